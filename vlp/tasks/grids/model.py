"""An encoder-decoder for ARC after ViTARC (Li et al. 2024): grid in, output grid cell by cell.

Every cell of a padded template is a token. Encoder and decoder encode its position; only the
encoder sees objects (papers.md#vitarc-v13).
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from vlp.config import Config, ConfigError
from vlp.layers.attention import Attention, CausalAttention
from vlp.layers.blocks import FeedForward
from vlp.models.vision.backbone import attention_encodings, create_encoding, on_tokens
from vlp.positions.base import PositionContext, PositionEncoding, call_method
from vlp.positions.options import PositionConfig
from vlp.tasks.grids.data import TOKENS, GridBatch


class GridModelConfig(Config):
    """Sizes and position encodings."""

    width: int = Field(128, ge=1, description="channels of the model")
    encoder_layers: int = Field(3, ge=1, description="layers of the encoder")
    decoder_layers: int = Field(3, ge=1, description="layers of the decoder")
    # The authors use 8 (papers.md#vitarc-v2).
    heads: int = Field(8, ge=1, description="attention heads, a divisor of the width")
    feed_forward: int = Field(512, ge=1, description="hidden channels of the feed-forward block")
    # papers.md#vitarc-v6
    scale: float | None = Field(
        None,
        gt=0,
        description="scale of attention logits; null: 1 / sqrt(head width) as in ViTARC's Eq. 11; "
        "1.0: none, as in the authors' T5 code",
    )
    positions: tuple[PositionConfig, ...] = Field(
        (), description="of the encoder: sine-2d, object (OPE), alibi-2d (2D-RPE); option mixer"
    )
    decoder_positions: tuple[PositionConfig, ...] | None = Field(
        None, description="of the decoder; null: the encoder's, `object` without its boxes"
    )


class GridEncoderLayer(nn.Module):
    """Pre-norm self-attention and feed-forward."""

    def __init__(self, config: GridModelConfig, side: int) -> None:
        super().__init__()
        width, heads = config.width, config.heads
        encodings = attention_encodings(config.positions, width, heads, (side, side))
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, positions=encodings, scale=config.scale)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, config.feed_forward)

    def forward(self, x: Tensor, context: PositionContext) -> Tensor:
        """Encode (B, 1 + T, width) -> same shape."""
        x = x + self.attention(self.attention_norm(x), context=context)
        return x + self.feed_forward(self.feed_forward_norm(x))


class GridDecoderLayer(nn.Module):
    """Pre-norm causal self-attention, attention to the encoder, and feed-forward."""

    def __init__(self, config: GridModelConfig, side: int) -> None:
        super().__init__()
        width, heads = config.width, config.heads
        positions = _decoder_positions(config)
        encodings = attention_encodings(positions, width, heads, (side, side), causal=True)
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, encodings, config.scale)
        self.cross_norm = nn.LayerNorm(width)
        self.cross_attention = Attention(width, heads, scale=config.scale)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, config.feed_forward)

    def forward(self, x: Tensor, encoded: Tensor, context: PositionContext) -> Tensor:
        """Decode (B, T, width) with encoded (B, 1 + T, width) -> (B, T, width)."""
        x = x + self.attention(self.attention_norm(x), context)
        x = x + self.cross_attention(self.cross_norm(x), encoded)
        return x + self.feed_forward(self.feed_forward_norm(x))


class GridTransformer(nn.Module):
    """p(output template | input template, task), one cell after another in raster order.

    Padding is attended to and predicted like any token.

    Args:
        size: rows and columns of the largest grid; the template has one more of each for borders.
        tasks: number of tasks.
    """

    def __init__(self, config: GridModelConfig, size: int, tasks: int) -> None:
        super().__init__()
        width = config.width
        if width % config.heads:
            raise ConfigError(f"model.heads {config.heads} do not divide model.width {width}")
        side = size + 1
        self.grid, self.start = (side, side), TOKENS
        self.embedding = nn.Embedding(TOKENS + 1, width)
        self.tasks = nn.Embedding(tasks, width)
        self.encoder_places, self.decoder_places = (
            nn.ModuleList(
                create_encoding(position, width=width, grid=self.grid)
                for position in positions
                if on_tokens(position)
            )
            for positions in (config.positions, _decoder_positions(config))
        )
        self.encoder = nn.ModuleList(
            GridEncoderLayer(config, side) for _ in range(config.encoder_layers)
        )
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(
            GridDecoderLayer(config, side) for _ in range(config.decoder_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, batch: GridBatch, outputs: Tensor) -> Tensor:
        """Return logits (B, T, tokens) of cells given earlier cells of `outputs` (B, T) int64.

        `outputs` replaces `batch.outputs`, which is not read.
        """
        return self.decode(outputs, self.encode(batch))

    def encode(self, batch: GridBatch) -> Tensor:
        """Return states of the task and of the cells, (B, 1 + T, width)."""
        cells = self.embedding(batch.inputs)
        # A prefix token lets one model learn several tasks; ViTARC trains a model per task.
        x = torch.cat([self.tasks(batch.tasks)[:, None], cells], 1)
        context = PositionContext(grid=self.grid, prefix_tokens=1, boxes=batch.boxes)
        for encoding in self.encoder_places:
            x = call_method(encoding, PositionEncoding.tokens, x, context)
        for layer in self.encoder:
            x = layer(x, context)
        return self.encoder_norm(x)

    def decode(self, outputs: Tensor, encoded: Tensor) -> Tensor:
        """Return the logits of `forward` from `encoded`, the result of `encode`."""
        # The input at a cell is the previous token, with the encoding of the cell to predict.
        before = functional.pad(outputs[:, :-1], (1, 0), value=self.start)
        x, context = self.embedding(before), PositionContext(grid=self.grid)
        for encoding in self.decoder_places:
            x = call_method(encoding, PositionEncoding.tokens, x, context)
        for layer in self.decoder:
            x = layer(x, encoded, context)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, batch: GridBatch) -> Tensor:
        """Decode output templates greedily, cell by cell: (B, T) int64."""
        encoded = self.encode(batch)
        outputs = torch.zeros_like(batch.inputs)
        # Position encodings need the whole template, so every cell costs a full pass.
        for cell in range(outputs.shape[1]):
            outputs[:, cell] = self.decode(outputs, encoded)[:, cell].argmax(-1)
        return outputs


def _decoder_positions(config: GridModelConfig) -> tuple[PositionConfig, ...]:
    return config.positions if config.decoder_positions is None else config.decoder_positions
