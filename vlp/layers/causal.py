"""Causal self-attention, for autoregressive models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from vlp.layers.attention import NO_CONTEXT, attend, mask_bias
from vlp.positions.base import PositionContext, PositionEncoding, call_method, hooks_of


class Past:
    """Cache of a layer's keys and values, (B, heads, T, head width), or None before any token."""

    def __init__(self, key: Tensor | None = None, value: Tensor | None = None) -> None:
        self.key, self.value = key, value

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, and return all keys and values."""
        self.key = key if self.key is None else torch.cat([self.key, key], -2)
        self.value = value if self.value is None else torch.cat([self.value, value], -2)
        return self.key, self.value


class CausalAttention(nn.Module):
    """Self-attention of every token to itself and to earlier tokens.

    Without encodings, or with `rotate` hooks alone, it runs in PyTorch's fused causal kernel.

    Args:
        width: channels of the states.
        heads: attention heads; divide the width.
        positions: encodings with `rotate`, `bias` and `value` hooks; `causal` must be True.
        scale: see `attend`.
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
                    f"{type(encoding).__name__} acts on {', '.join(hooks)}; causal self-attention "
                    "has the hooks rotate, bias and value"
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
            states: the whole sequence, or with `past` the next token, T = 1.
            context: for the hooks; None is `NO_CONTEXT`.
            past: cache of earlier tokens, to which the new token is appended; not with encodings,
                as hooks need all tokens.
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
                    "a past takes one token at a time, and no position encodings in attention; "
                    f"this call has {states.shape[-2]} tokens and {len(self.positions)} encodings"
                )
            out = attend(query, *past.append(key, value), scale=self.scale)
        return self.output(out.transpose(1, 2).flatten(-2))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, context: PositionContext
    ) -> Tensor:
        encodings = list(self.positions)
        # The fused kernel's backward pass is slow in half precision on a CPU.
        slow = query.device.type == "cpu" and query.dtype not in (torch.float32, torch.float64)
        if slow or any(hooks_of(encoding) - {"rotate"} for encoding in encodings):
            tokens = query.shape[-2]
            mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
            bias = mask_bias(mask, query.dtype)
            return attend(query, key, value, encodings, context, bias, scale=self.scale)
        for encoding in encodings:
            query, key = call_method(encoding, PositionEncoding.rotate, query, key, context)
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale
        )
