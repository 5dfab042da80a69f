"""Causal self-attention, for models that generate one token after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from vlp.layers.attention import NO_CONTEXT, attend, mask_bias
from vlp.positions.base import PositionContext, PositionEncoding, hooks_of, through_call


class Past:
    """Cache of a layer's keys and values, (B, heads, T, head width), or None before any token."""

    def __init__(self, key: Tensor | None = None, value: Tensor | None = None) -> None:
        self.key, self.value = key, value

    def extended(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens, and return all."""
        self.key = key if self.key is None else torch.cat([self.key, key], -2)
        self.value = value if self.value is None else torch.cat([self.value, value], -2)
        return self.key, self.value


class CausalAttention(nn.Module):
    """Self-attention of every token to itself and to earlier ones.

    Without encodings that add to the logits or the output it runs in the fused causal kernel, which
    never makes the (tokens, tokens) matrix.

    Args:
        heads: attention heads; divide the width.
        positions: encodings with `rotate`, `bias` and `value` hooks; their terms for a pair must
            not depend on later tokens.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        positions: Sequence[PositionEncoding] = (),
        scale: float | None = None,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads do not divide width {width}")
        for encoding in positions:
            if hooks := sorted(hooks_of(encoding) - {"rotate", "bias", "value"}):
                raise ValueError(
                    f"{type(encoding).__name__} acts on {', '.join(hooks)}, for which causal "
                    "self-attention has no place"
                )
        self.heads, self.scale = heads, scale
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.positions = nn.ModuleList(positions)

    def forward(
        self, states: Tensor, context: PositionContext | None = None, past: Past | None = None
    ) -> Tensor:
        """Attend causally, (B, T, width) -> (B, T, width).

        Args:
            states: the whole sequence, or with `past` the one token that comes next.
            context: for the hooks; see `attend`.
            past: earlier tokens; gets the new one. Without encodings only, as hooks need all
                tokens.
        """
        query, key, value = (
            project(states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        if past is None:
            out = self._attend(query, key, value, context or NO_CONTEXT)
        else:
            if self.positions or states.shape[-2] != 1:
                raise ValueError(
                    "a past is continued by one token at a time, without position encodings in "
                    f"attention; there are {states.shape[-2]} tokens and "
                    f"{len(self.positions)} encodings"
                )
            out = attend(query, *past.extended(key, value), scale=self.scale)
        return self.output(out.transpose(1, 2).flatten(-2))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, context: PositionContext
    ) -> Tensor:
        encodings = list(self.positions)
        # The kernel's backward pass is slow in bf16 on a CPU.
        slow = query.device.type == "cpu" and query.dtype not in (torch.float32, torch.float64)
        if slow or any(hooks_of(encoding) - {"rotate"} for encoding in encodings):
            tokens = query.shape[-2]
            earlier = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
            bias = mask_bias(earlier, query.dtype)
            return attend(query, key, value, encodings, context, bias, scale=self.scale)
        for encoding in encodings:
            query, key = through_call(encoding, PositionEncoding.rotate, query, key, context)
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale
        )
