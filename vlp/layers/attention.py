"""Multi-head attention with the hooks of position encodings; fused where no hook forbids it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from vlp.positions.base import PositionContext, PositionEncoding


class Attention(nn.Module):
    """Self- or cross-attention on (batch, tokens, width) states.

    Args:
        width: channels.
        heads: attention heads; divide the width.
        output: whether an output projection follows (the cross-attention of layout `ace` has none).
        positions: encodings whose `inputs`, `rotate`, `bias` and `value` hooks are called.
        fused: use scaled_dot_product_attention where no `value` hook needs the weights; None
            chooses by device: fused on accelerators, explicit on CPU, where the backward of the
            fused kernel is slow in bf16.

    On the explicit path the probabilities (batch, heads, queries, keys) pass through the submodule
    `probabilities`, where a forward hook may read or replace them; the fused path never has them.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        output: bool = True,
        positions: Sequence[PositionEncoding] = (),
        fused: bool | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width) if output else None
        self.positions = nn.ModuleList(positions)
        self.probabilities = nn.Identity()

    def forward(
        self,
        states: Tensor,
        context_states: Tensor | None = None,
        mask: Tensor | None = None,
        context: PositionContext | None = None,
    ) -> Tensor:
        """Attend from `states` to `context_states` (to themselves when None).

        Args:
            states: (B, Q, width).
            context_states: (B, K, width) or None.
            mask: (B, K) bool, True = may be attended to.
            context: what the position hooks need.

        Returns:
            (B, Q, width).
        """
        source = states if context_states is None else context_states
        query, key, value = states, source, source
        for encoding in self._using("inputs"):
            query, key, value = encoding("inputs", query, key, value, context)
        query = self.query(query).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key = self.key(key).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        value = self.value(value).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        for encoding in self._using("rotate"):
            query, key = encoding("rotate", query, key, context)

        logit_bias = self._logit_bias(query, key, mask, context)
        fused = states.device.type != "cpu" if self.fused is None else self.fused
        if fused and not self._using("value"):
            out = functional.scaled_dot_product_attention(query, key, value, attn_mask=logit_bias)
        else:
            logits = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
            if logit_bias is not None:
                logits = logits + logit_bias
            attention = self.probabilities(logits.softmax(-1).to(value.dtype))
            out = attention @ value
            for encoding in self._using("value"):
                addition = encoding("value", attention, context)
                out = out if addition is None else out + addition
        out = out.transpose(1, 2).flatten(-2)
        return out if self.output is None else self.output(out)

    def _using(self, hook: str) -> list[PositionEncoding]:
        return [
            encoding
            for encoding in self.positions
            if isinstance(encoding, PositionEncoding) and hook in encoding.hooks
        ]

    def _logit_bias(
        self, query: Tensor, key: Tensor, mask: Tensor | None, context: PositionContext | None
    ) -> Tensor | None:
        """Mask and biases as one additive tensor that broadcasts to (B, heads, Q, K)."""
        total = None
        if mask is not None:
            # A finite lowest value: a row without keys gives a mean, not NaN.
            lowest = torch.finfo(query.dtype).min
            total = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
            total = total.masked_fill(~mask, lowest)[:, None, None, :]
        for encoding in self._using("bias"):
            bias = encoding("bias", query, key, context)
            if bias is not None:
                total = bias if total is None else total + bias
        return total if total is None else total.to(query.dtype)
