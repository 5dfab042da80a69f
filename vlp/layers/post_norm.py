"""BERT's post-norm layer, with a cross-attention between self-attention and feed-forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vlp.layers.attention import Attention
from vlp.layers.feed_forward import contract
from vlp.layers.stream import LayerNorm
from vlp.positions.base import PositionContext, PositionEncoding

NORM_EPS = 1e-12  # BERT's


class FeedForward(nn.Module):
    """Linear, exact GELU, linear: (..., width) -> (..., width)."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, intermediate)
        self.activation = nn.GELU()
        self.contract = nn.Linear(intermediate, width)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        return contract(self.expand(x), self.activation, self.contract)


def pick(states: Tensor, wanted: Tensor) -> Tensor:
    """Return tokens `wanted` (B, Q) int64 of states (B, T, width)."""
    return states.gather(1, wanted[..., None].expand(-1, -1, states.shape[2]))


class PostNormLayer(nn.Module):
    """Self-attention and feed-forward, each dropped in part, added and normalised, as in BERT."""

    def __init__(self, width: int, heads: int, intermediate: int, dropout: float = 0) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.attention_norm = LayerNorm(width, eps=NORM_EPS)
        self.feed_forward = FeedForward(width, intermediate)
        self.feed_forward_norm = LayerNorm(width, eps=NORM_EPS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """(B, N, width) with mask (B, N) bool, True = real -> (B, N, width)."""
        states = self.attention_norm(states + self.dropout(self.attention(states, mask=mask)))
        return self.feed_forward_norm(states + self.dropout(self.feed_forward(states)))


class CrossLayer(nn.Module):
    """One cross-modal layer; the same weights serve both streams.

    Three steps, each added and then normalised: self-attention, cross-attention, feed-forward.
    They are separate modules here because both streams finish the first step before either
    attends to the other.

    Args:
        width: channels.
        heads: attention heads.
        intermediate: channels of the feed-forward.
        cross_output: whether the cross-attention has an output projection (layout `albef`).
        positions: encodings of the cross-attention.
        self_positions: encodings of the self-attention.
        dropout: share of each step's output that is set to 0 in training, before it is added.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        intermediate: int,
        cross_output: bool = False,
        positions: Sequence[PositionEncoding] = (),
        self_positions: Sequence[PositionEncoding] = (),
        dropout: float = 0,
    ) -> None:
        super().__init__()
        self.attention = Attention(width, heads, positions=self_positions)
        self.attention_norm = LayerNorm(width, eps=NORM_EPS)
        self.cross_attention = Attention(width, heads, output=cross_output, positions=positions)
        self.cross_norm = LayerNorm(width, eps=NORM_EPS)
        self.feed_forward = FeedForward(width, intermediate)
        self.feed_forward_norm = LayerNorm(width, eps=NORM_EPS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, step: str, *arguments: Any) -> Any:
        """Run `attend_self`, `attend_other`, `project` or `anchor_terms`.

        They go through the module's call, where ZeRO-3 and other wrappers gather its weights.
        """
        return getattr(self, step)(*arguments)

    def attend_self(
        self,
        states: Tensor,
        mask: Tensor | None,
        context: PositionContext,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """First step: (B, T, width) -> (B, T, width), or of tokens `wanted` (B, Q) alone."""
        if wanted is None:
            attended = self.attention(states, mask=mask, context=context)
        else:
            whole, states = states, pick(states, wanted)
            attended = self.attention(states, whole, mask=mask, context=context)
        return self.attention_norm(states + self.dropout(attended))

    def attend_other(
        self,
        states: Tensor,
        other: Tensor | None,
        mask: Tensor | None,
        context: PositionContext,
        projected: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Second and third step: (B, Q, width) attends to `other` (B, K, width).

        Or to its keys and values, which `project` gave.
        """
        crossed = self.cross_attention(
            states, other, mask=mask, context=context, projected=projected
        )
        return self.add_crossed(states, crossed)

    def project(self, other: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of (B, K, width) for `attend_other`."""
        return self.cross_attention.project(other)

    def anchor_terms(self, states: Tensor) -> Tensor | None:
        """Return what the cross-attention of both directions shares; see `PositionContext`."""
        return self.cross_attention.anchor_terms(states)

    def add_crossed(self, states: Tensor, crossed: Tensor) -> Tensor:
        """Add a cross-attention's output to states, both (B, T, width); then the third step."""
        states = self.cross_norm(states + self.dropout(crossed))
        return self.feed_forward_norm(states + self.dropout(self.feed_forward(states)))
