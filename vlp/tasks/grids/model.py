"""An encoder-decoder for ARC after ViTARC (Li et al. 2024): grid in, output grid cell by cell.

Every cell of a padded template is a token; 2D sinusoids and 2D-RPE give its place to encoder and
decoder, objects are given to the encoder alone (papers.md#vitarc-v13). Logits are scaled by Eq. 11
or, by option, not at all as in the authors' code (papers.md#vitarc-v6).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from vlp.config import Config, ConfigError
from vlp.layers.attention import Attention
from vlp.layers.blocks import FeedForward
from vlp.layers.causal import CausalAttention
from vlp.models.vision.backbone import attention_encodings, create_encoding, on_tokens
from vlp.positions.base import PositionContext, PositionEncoding, call_method
from vlp.positions.options import PositionConfig


class GridModelConfig(Config):
    """Sizes and position encodings; the authors use 8 heads (papers.md#vitarc-v2)."""

    width: int = Field(128, ge=1, description="channels of the model")
    encoder_layers: int = Field(3, ge=1, description="layers of the encoder")
    decoder_layers: int = Field(3, ge=1, description="layers of the decoder")
    heads: int = Field(8, ge=1, description="attention heads, a divisor of the width")
    feed_forward: int = Field(512, ge=1, description="channels between both of its layers")
    scale: float | None = Field(
        None,
        gt=0,
        description="of queries times keys in all attention; null is 1 / sqrt(head width) as in "
        "ViTARC's Eq. 11, 1.0 the T5 code that its authors use",
    )
    positions: tuple[PositionConfig, ...] = Field(
        (), description="of the encoder: sine-2d, object (OPE), alibi-2d (2D-RPE); option mixer"
    )
    decoder_positions: tuple[PositionConfig, ...] | None = Field(
        None, description="null is those of the encoder; there, `object` tells places alone"
    )


class GridQuestion(NamedTuple):
    """Input of the encoder."""

    # (B, T) int64, the template's tokens
    inputs: Tensor
    # (B, K, 4), see `PositionContext`
    boxes: Tensor
    # (B,) int64, number of the task in the model
    tasks: Tensor


class GridEncoderLayer(nn.Module):
    """Self-attention and feed-forward, each on normalised states and added."""

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
    """Causal self-attention, attention to the encoder, feed-forward."""

    def __init__(self, config: GridModelConfig, side: int) -> None:
        super().__init__()
        width, heads = config.width, config.heads
        encodings = attention_encodings(
            _of_decoder(config), width, heads, (side, side), causal=True
        )
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
        size: rows and columns of the largest grid; the template has one more of either.
    """

    def __init__(self, config: GridModelConfig, size: int, tokens: int, tasks: int) -> None:
        super().__init__()
        width = config.width
        if width % config.heads:
            raise ConfigError(f"model.heads {config.heads} do not divide model.width {width}")
        side = size + 1
        self.grid, self.start = (side, side), tokens
        self.embedding = nn.Embedding(tokens + 1, width)
        self.tasks = nn.Embedding(tasks, width)
        self.encoder_places, self.decoder_places = (
            nn.ModuleList(
                create_encoding(position, width=width, grid=self.grid)
                for position in positions
                if on_tokens(position)
            )
            for positions in (config.positions, _of_decoder(config))
        )
        self.encoder = nn.ModuleList(
            GridEncoderLayer(config, side) for _ in range(config.encoder_layers)
        )
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(
            GridDecoderLayer(config, side) for _ in range(config.decoder_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens)

    def forward(self, question: GridQuestion, outputs: Tensor) -> Tensor:
        """Return logits (B, T, tokens) of cells given earlier cells of `outputs` (B, T) int64."""
        return self.decode(outputs, self.encode(question))

    def encode(self, question: GridQuestion) -> Tensor:
        """Return states of the task and of the cells, (B, 1 + T, width)."""
        cells = self.embedding(self._checked(question.inputs))
        # A task token without a place leads the input, so that one model may learn several tasks;
        # ViTARC trains one model a task.
        x = torch.cat([self.tasks(question.tasks)[:, None], cells], 1)
        context = PositionContext(grid=self.grid, prefix_tokens=1, boxes=question.boxes)
        for encoding in self.encoder_places:
            x = call_method(encoding, PositionEncoding.tokens, x, context)
        for layer in self.encoder:
            x = layer(x, context)
        return self.encoder_norm(x)

    def decode(self, outputs: Tensor, encoded: Tensor) -> Tensor:
        """Return logits (B, T, tokens) of outputs (B, T), each given the earlier ones."""
        # The input at each cell is the previous token, with the place of the cell to be predicted.
        before = functional.pad(self._checked(outputs)[:, :-1], (1, 0), value=self.start)
        x, context = self.embedding(before), PositionContext(grid=self.grid)
        for encoding in self.decoder_places:
            x = call_method(encoding, PositionEncoding.tokens, x, context)
        for layer in self.decoder:
            x = layer(x, encoded, context)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, question: GridQuestion) -> Tensor:
        """Return greedily the likeliest token of every cell after earlier ones: (B, T) int64.

        One pass of `forward` tells whether a template is the greedy one.
        """
        encoded = self.encode(question)
        outputs = torch.zeros_like(question.inputs)
        # Each cell costs a pass over the whole template, which the encodings' hooks need.
        for cell in range(outputs.shape[1]):
            outputs[:, cell] = self.decode(outputs, encoded)[:, cell].argmax(-1)
        return outputs

    def _checked(self, tokens: Tensor) -> Tensor:
        rows, columns = self.grid
        if tokens.ndim != 2 or tokens.shape[1] != rows * columns:
            raise ValueError(
                f"templates of {rows} x {columns} cells are (B, {rows * columns}), not "
                f"{tuple(tokens.shape)}"
            )
        return tokens


def _of_decoder(config: GridModelConfig) -> tuple[PositionConfig, ...]:
    return config.positions if config.decoder_positions is None else config.decoder_positions
