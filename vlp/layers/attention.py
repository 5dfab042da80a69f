"""Attention, also causal, with the hooks of position encodings; fused where hooks allow it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from vlp.compilation import log_once, off_cpu, on_gpu
from vlp.positions.anchor import HAS_TRITON
from vlp.positions.base import (
    PositionContext,
    PositionEncoding,
    call_method,
    has_fast_path,
    hooks_of,
)

logger = logging.getLogger(__name__)

Fused = bool | None
# Enough for encodings with a grid in their options.
NO_CONTEXT = PositionContext()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    encodings: Iterable[nn.Module] = (),
    context: PositionContext | None = None,
    bias: Tensor | None = None,
    fused: Fused = None,
    dropout: float = 0.0,
    probabilities: nn.Module | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(scale q k^T + biases) v, (B, heads, Q, head width), with encodings' hooks.

    Args:
        query: (B, heads, Q, head width), projected, not scaled.
        key, value: (B, heads, K, head width), projected.
        encodings: with `rotate`, `bias` and `value` hooks; may be in wrappers.
        context: for the hooks; None is `NO_CONTEXT`.
        bias: added to the scaled logits, broadcasts to (B, heads, Q, K), such as `mask_bias`.
        fused: use scaled_dot_product_attention unless a `value` hook needs the probabilities; None:
            fused on accelerators, explicit on CPU.
        dropout: probability of dropping an attention weight.
        probabilities: module that the attention weights pass through in place of dropout (explicit
            path only), so that its forward hooks may read or replace them.
        scale: of the products of queries and keys, but not of biases; None: 1 / sqrt(head width).
    """
    encodings = list(encodings)
    context = NO_CONTEXT if context is None else context
    for encoding in select_by_hook(encodings, "rotate"):
        query, key = call_method(encoding, PositionEncoding.rotate, query, key, context)
    for encoding in select_by_hook(encodings, "bias"):
        term = call_method(encoding, PositionEncoding.bias, query, key, context)
        if term is not None:
            bias = term if bias is None else bias + term
    bias = None if bias is None else _clamp_float16(bias.to(query.dtype))
    value_encodings = select_by_hook(encodings, "value")
    # On CPU the fused backward is slow in bf16. FlexAttention with tables was slower than a dense
    # bias (docs/results/gpu.md).
    fused = off_cpu(query) if fused is None else fused
    if fused and not value_encodings:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=dropout, scale=scale
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = (query * scale) @ key.transpose(-2, -1)
    if bias is not None:
        logits = _clamp_float16(logits + bias)
    attention = logits.softmax(-1).to(value.dtype)
    if probabilities is not None:
        attention = probabilities(attention)
    elif dropout:
        attention = functional.dropout(attention, dropout)
    out = attention @ value
    for encoding in value_encodings:
        term = call_method(encoding, PositionEncoding.value, attention, context)
        out = out if term is None else out + term
    return out


def cast_once(states: Tensor) -> Tensor:
    """Cast float32 states (B, N, width) to autocast's dtype on a GPU, once for all projections."""
    device_type = states.device.type
    if on_gpu(states) and torch.is_autocast_enabled(device_type) and states.dtype == torch.float32:
        return states.to(torch.get_autocast_dtype(device_type))
    return states


def mask_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias of 0 where a boolean mask is True, the lowest number where it is False."""
    # Not -inf: where a query may attend to no key, the output is the values' mean, not NaN.
    lowest = torch.finfo(dtype).min
    # lowest - lowest * mask in one GPU kernel, which takes a 0-d CPU tensor as an argument.
    return torch.add(torch.tensor(lowest, dtype=dtype, device="cpu"), mask, alpha=-lowest)


def _clamp_float16(logits: Tensor) -> Tensor:
    # In float16 sums with the lowest number overflow to -inf.
    if logits.dtype != torch.float16:
        return logits
    return logits.clamp(min=torch.finfo(logits.dtype).min)


def select_by_hook(encodings: Iterable[nn.Module], hook: str) -> list[nn.Module]:
    """Return the encodings that have a hook, in order."""
    return [encoding for encoding in encodings if hook in hooks_of(encoding)]


class Attention(nn.Module):
    """Self- or cross-attention on (batch, tokens, width) states.

    On the explicit path the attention weights (batch, heads, queries, keys) pass through the
    submodule `probabilities`, where a forward hook may read or replace them.

    Args:
        width: channels of the states.
        heads: attention heads; divide the width.
        output: whether an output projection follows.
        positions: encodings with `inputs`, `rotate`, `bias` and `value` hooks.
        fused: see `attend`; unless it is False, ACE-RPE as the only encoding uses a kernel on a GPU
            (`vlp.positions.anchor_attention`).
        scale: see `attend`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        output: bool = True,
        positions: Sequence[PositionEncoding] = (),
        fused: Fused = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        for encoding in positions:
            if hooks_of(encoding) == {"tokens"}:
                raise ValueError(
                    f"{type(encoding).__name__} acts on tokens, not in layers of attention"
                )
        self.heads, self.fused, self.scale = heads, fused, scale
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
        projected: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attend from states (B, Q, width) to `context_states`: (B, Q, width).

        Args:
            states: (B, Q, width).
            context_states: (B, K, width); None: `states`.
            mask: (B, K) bool, True = may be attended to.
            context: for the hooks; None is `NO_CONTEXT`.
            projected: keys and values of `project`, (B, K, width) each, in place of
                `context_states`; needs `shares_keys`.
        """
        context = NO_CONTEXT if context is None else context
        states = cast_once(states)
        key_states = states if context_states is None else cast_once(context_states)
        if self._uses_kernel(states):
            (encoding,) = self.positions
            out = call_method(
                encoding,
                PositionEncoding.attend,
                self.query(states),
                self.key(key_states),
                self.value(key_states),
                self._weights(),
                mask,
                context,
                self.scale,
            )
            return out if self.output is None else self.output(out)
        query, key, value = self._project_inputs(states, key_states, projected, context)
        out = attend(
            self.split_heads(query),
            self.split_heads(key),
            self.split_heads(value),
            self.positions,
            context,
            None if mask is None else mask_bias(mask, query.dtype)[:, None, None, :],
            self.fused,
            probabilities=self.probabilities,
            scale=self.scale,
        )
        return self.merge_heads(out)

    def split_heads(self, states: Tensor) -> Tensor:
        """Split heads: (B, T, width) -> (B, heads, T, head width)."""
        return states.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def merge_heads(self, out: Tensor) -> Tensor:
        """Merge heads and project the output: (B, heads, T, head width) -> (B, T, width)."""
        states = out.transpose(1, 2).flatten(-2)
        return states if self.output is None else self.output(states)

    def _project_inputs(
        self,
        states: Tensor,
        key_states: Tensor,
        projected: tuple[Tensor, Tensor] | None,
        context: PositionContext,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, (B, tokens, width) each, after the hooks `inputs`."""
        query = states
        key, value = (key_states, key_states) if projected is None else projected
        if projected is not None:
            context = replace(context, projections=(self.key.weight, self.value.weight))
        for encoding in select_by_hook(self.positions, "inputs"):
            query, key, value = call_method(
                encoding, PositionEncoding.inputs, query, key, value, context
            )
        # Queries first: gradients are summed in the order of projections.
        query = self.query(query)
        if projected is not None:
            return query, key, value
        return query, self.key(key), self.value(value)

    def project(self, context_states: Tensor) -> tuple[Tensor, Tensor]:
        """Project (B, K, width) to the `projected` keys and values that several calls may share."""
        return self.key(context_states), self.value(context_states)

    @property
    def shares_keys(self) -> bool:
        """Return whether calls may share results of `project`, and skip some of the queries."""
        return all(has_fast_path(encoding, "shares_keys") for encoding in self.positions)

    def kernel_terms(self, states: Tensor) -> Tensor | None:
        """Return `PositionContext.kernel_terms` for these states; None without a kernel."""
        if not self._uses_kernel(states):
            return None
        (encoding,) = self.positions
        return call_method(encoding, PositionEncoding.kernel_terms, self._weights())

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query.weight, self.key.weight, self.value.weight

    def _uses_kernel(self, states: Tensor) -> bool:
        """Return whether a kernel of the encoding (ACE-RPE's) computes the whole attention."""
        kernels = [encoding for encoding in self.positions if has_fast_path(encoding, "has_kernel")]
        if not kernels or not on_gpu(states) or self.fused is False:
            return False
        # Without the hooks `bias` and `value`, SDPA is fused as well.
        if hooks_of(kernels[0]) == {"inputs"}:
            return False
        is_alone = len(self.positions) == 1 and type(self.probabilities) is nn.Identity
        head_width = self.query.out_features // self.heads
        is_supported = head_width <= 256 and states.dtype != torch.float64 and HAS_TRITON
        if not (is_alone and is_supported):
            _log_explicit(head_width, len(self.positions), states.dtype)
        return is_alone and is_supported


@log_once
def _log_explicit(head_width: int, encodings: int, dtype: torch.dtype) -> None:
    logger.info(
        "attention with ACE-RPE runs unfused: its kernel needs Triton, heads of at most 256 "
        "channels, no float64 and no other encoding in the layer; this layer has heads of width "
        "%d, %s and %d encodings",
        *(head_width, dtype, encodings),
    )


class Past:
    """Cache of a layer's keys and values, (B, heads, T, head width) each; None while empty."""

    def __init__(self, key: Tensor | None = None, value: Tensor | None = None) -> None:
        self.key, self.value = key, value

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, and return all keys and values."""
        self.key = key if self.key is None else torch.cat([self.key, key], -2)
        self.value = value if self.value is None else torch.cat([self.value, value], -2)
        return self.key, self.value


class CausalAttention(nn.Module):
    """Self-attention of every token to itself and to earlier tokens.

    Without encodings, or with `rotate` hooks alone, it uses PyTorch's fused causal kernel.

    Args:
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
        # The fused kernel's backward pass is slow in half precision on a CPU.
        is_slow = query.device.type == "cpu" and query.dtype not in (torch.float32, torch.float64)
        if is_slow or any(hooks_of(encoding) - {"rotate"} for encoding in self.positions):
            tokens = query.shape[-2]
            mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
            bias = mask_bias(mask, query.dtype)
            return attend(query, key, value, self.positions, context, bias, scale=self.scale)
        for encoding in self.positions:
            query, key = call_method(encoding, PositionEncoding.rotate, query, key, context)
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale
        )
