"""Widget captioning (Li et al. 2020): a transformer over a screen's widgets and a caption decoder.

As in Li et al. 2021 (section 4.4) widgets have no pixels, but type, clickability and words.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from vlp.config import Config, ConfigError
from vlp.layers.attention import Attention
from vlp.layers.blocks import FeedForward
from vlp.models.decoder import beam_search
from vlp.models.vision.backbone import create_encoding
from vlp.positions import PositionContext, PositionEncoding
from vlp.positions.base import call_method
from vlp.positions.options import PositionConfig
from vlp.positions.sine import sinusoid
from vlp.tasks.widgets.data import WidgetBatch
from vlp.tasks.widgets.screens import KINDS


class WidgetModelConfig(Config):
    """Sizes, by default the papers', and the encodings of boxes."""

    width: int = Field(128, ge=1, description="channels of a token")
    heads: int = Field(8, ge=1, description="attention heads, a divisor of the width")
    layers: int = Field(6, ge=1, description="layers of the screen encoder")
    decoder_layers: int = Field(6, ge=1, description="layers of the caption decoder")
    intermediate: int = Field(512, ge=1, description="hidden channels of a feed-forward block")
    dropout: float = Field(0.2, ge=0, lt=1, description="dropout probability")
    positions: tuple[PositionConfig, ...] = Field(
        (), description="position encodings of the widgets' boxes"
    )
    combine: Literal["concat", "add"] = Field(
        "concat",
        description="concat: content and position pass one dense layer (appendix B of Li et al. "
        "2021); add: the position is added to that layer's output",
    )
    trees: int = Field(
        0, ge=0, description="rows of the embeddings of tree indices; the public code has 500"
    )


class _ScreenLayer(nn.Module):
    """Pre-norm self-attention of widgets and feed-forward."""

    def __init__(self, config: WidgetModelConfig, positions: list[PositionEncoding]) -> None:
        super().__init__()
        width, dropout = config.width, config.dropout
        # Only the explicit path has dropout of probabilities; it is fast enough for some hundred
        # widgets.
        fused = False if dropout else None
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, config.heads, positions=positions, fused=fused)
        self.attention.add_module("probabilities", nn.Dropout(dropout))
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, config.intermediate)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, mask: Tensor, context: PositionContext) -> Tensor:
        """Encode (B, W, width) with mask (B, W) -> (B, W, width)."""
        attended = self.attention(self.attention_norm(states), mask=mask, context=context)
        states = states + self.dropout(attended)
        return states + self.dropout(self.feed_forward(self.feed_forward_norm(states)))


class ScreenEncoder(nn.Module):
    """Encoder of a screen's widgets; encodings read the boxes as `context.coordinates`."""

    def __init__(self, config: WidgetModelConfig, pad_id: int) -> None:
        super().__init__()
        self.config, self.pad_id = config, pad_id
        width = config.width
        self.kinds = nn.Embedding(len(KINDS), width)
        self.clickable = nn.Embedding(2, width)
        tree_tables = 3 if config.trees else 0
        self.trees = nn.ModuleList(nn.Embedding(config.trees, width) for _ in range(tree_tables))
        for table in (self.kinds, self.clickable, *self.trees):
            nn.init.normal_(table.weight, std=0.1)
        # Every layer has its own tables; encodings of tokens act once, before the first layer.
        encodings = [
            [create_encoding(p, width=width, heads=config.heads) for p in config.positions]
            for _ in range(config.layers)
        ]
        self.positions = nn.ModuleList(e for e in encodings[0] if "tokens" in e.hooks)
        has_position_part = config.combine == "concat" and len(self.positions) > 0
        parts = 4 + (config.trees > 0) + has_position_part
        self.content = nn.Linear(parts * width, width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            _ScreenLayer(config, [e for e in layer if e.hooks - {"tokens"}]) for layer in encodings
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, batch: WidgetBatch, words: nn.Embedding) -> Tensor:
        """Return the states of the widgets, (B, W, width).

        Args:
            words: word embedding, which the captioner shares with its decoder.
        """
        context = PositionContext(coordinates=batch.boxes)
        parts = [
            self._pooled_words(batch.words, words),
            self._pooled_words(batch.resources, words),
            self.kinds(batch.kinds),
            self.clickable(batch.clickable),
        ]
        if len(self.trees):
            # Indices beyond a table become 0, unknown, as in the public code.
            indices = batch.trees.masked_fill(batch.trees >= self.config.trees, 0).unbind(-1)
            embeddings = [table(index) for table, index in zip(self.trees, indices)]
            parts.append(torch.stack(embeddings).sum(0))
        if self.config.combine == "concat" and len(self.positions):
            parts.append(self._add_positions(torch.zeros_like(parts[0]), context))
        states = self.content(torch.cat(parts, -1)).relu()
        if self.config.combine == "add":
            states = self._add_positions(states, context)
        states = self.dropout(states)
        for layer in self.layers:
            states = layer(states, batch.widget_mask, context)
        return self.norm(states)

    def _add_positions(self, states: Tensor, context: PositionContext) -> Tensor:
        for encoding in self.positions:
            states = call_method(encoding, PositionEncoding.tokens, states, context)
        return states

    def _pooled_words(self, ids: Tensor, words: nn.Embedding) -> Tensor:
        """Return channel maxima over words, (B, W, N) -> (B, W, width), 0 without words."""
        word_mask = (ids != self.pad_id)[..., None]
        maxima = words(ids).masked_fill(~word_mask, -torch.inf).amax(-2)
        return maxima.masked_fill(~word_mask.any(-2), 0)


class WidgetCaptioner(nn.Module):
    """Screen encoder, and a causal decoder that attends to the state of one widget.

    Args:
        special_ids: tokens that are never generated, other than `end`.
        start: [CLS], the decoder's first input.
        end: [SEP], the last token of a caption.
    """

    def __init__(
        self,
        config: WidgetModelConfig,
        vocab_size: int,
        special_ids: tuple[int, ...],
        pad_id: int,
        start: int,
        end: int,
    ) -> None:
        super().__init__()
        width = config.width
        if width % config.heads or width % 2:
            raise ConfigError(
                f"model.heads {config.heads} must divide model.width {width}, which must be even"
            )
        self.start, self.end = start, end
        self.suppressed = tuple(token for token in special_ids if token != end)
        self.words = nn.Embedding(vocab_size, width)
        nn.init.normal_(self.words.weight, std=0.1)
        self.encoder = ScreenEncoder(config, pad_id)
        self.dropout = nn.Dropout(config.dropout)
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(
                width,
                config.heads,
                config.intermediate,
                config.dropout,
                batch_first=True,
                norm_first=True,
            )
            for _ in range(config.decoder_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocab_size)

    def forward(self, batch: WidgetBatch) -> Tensor:
        """Return logits of the next word piece of every caption, (T, L - 1, vocabulary)."""
        return self.decode(self.widgets(batch), batch.captions[:, :-1])

    def widgets(self, batch: WidgetBatch) -> Tensor:
        """Return the states of the widgets in `batch.targets`, (T, width)."""
        screen, widget = batch.targets.unbind(-1)
        return self.encoder(batch, self.words)[screen, widget]

    def decode(self, states: Tensor, ids: Tensor) -> Tensor:
        """Return next-token logits (T, L, vocabulary).

        Args:
            states: (T, width) of the captioned widgets.
            ids: (T, L) int64, [CLS] and the first word pieces of each caption.
        """
        length, memory = ids.shape[1], states[:, None]
        indices = torch.arange(length, device=ids.device)
        x = self.dropout(self.words(ids) + sinusoid(indices, states.shape[-1]))
        is_later = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=is_later, tgt_is_causal=True)
        return self.output(self.norm(x))

    @torch.no_grad()
    def generate(self, batch: WidgetBatch, length: int, beams: int = 1) -> Tensor:
        """Generate captions (T, at most `length`) int64, without [CLS], padded with [SEP].

        Args:
            length: largest number of word pieces, [SEP] included.
            beams: see `beam_search`.
        """
        states = self.widgets(batch)
        suppressed = list(self.suppressed)

        def step(ids: Tensor, parents: Tensor) -> Tensor:
            repeated = states.repeat_interleave(len(ids) // len(states), 0)
            logits = self.decode(repeated, ids)[:, -1].float()
            logits[:, suppressed] = -torch.inf
            return logits.log_softmax(-1)

        return beam_search(
            step, len(states), self.start, self.end, length, beams, device=states.device
        )
