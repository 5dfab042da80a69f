"""Multi-head attention with the hooks of position encodings; fused where no hook forbids it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from vlp.compilation import off_cpu, on_gpu, once
from vlp.positions.anchor import has_triton
from vlp.positions.base import PositionContext, PositionEncoding, hooks_of, offers, through_call

logger = logging.getLogger(__name__)

Fused = bool | None
# For hooks where there is no context; encodings that know their grid need no more.
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
    """Return softmax(scale q k^T + biases) v, with the hooks that follow the projections.

    Args:
        query: (B, heads, Q, head width), projected; scaled here.
        key: (B, heads, K, head width).
        value: (B, heads, K, head width).
        encodings: with `rotate`, `bias` and `value` hooks; may be in wrappers.
        context: for the hooks; None is `NO_CONTEXT`.
        bias: added to the scaled logits, broadcasts to (B, heads, Q, K), such as `mask_bias`.
        fused: use scaled_dot_product_attention where no `value` hook needs the probabilities; None:
            fused on accelerators, explicit on CPU.
        dropout: share of the probabilities that is dropped.
        probabilities: on the explicit path, module for the probabilities in place of dropout, so
            that hooks may read or replace them.
        scale: of the products of queries and keys, before any bias; None: 1 / sqrt(head width).
            Encodings' own terms keep their scale.

    Returns:
        (B, heads, Q, head width).
    """
    positions = list(encodings)
    context = NO_CONTEXT if context is None else context
    for encoding in _using(positions, "rotate"):
        query, key = through_call(encoding, PositionEncoding.rotate, query, key, context)
    bias_encodings, value_encodings = _using(positions, "bias"), _using(positions, "value")
    for encoding in bias_encodings:
        addition = through_call(encoding, PositionEncoding.bias, query, key, context)
        if addition is not None:
            bias = addition if bias is None else bias + addition
    bias = None if bias is None else _finite(bias.to(query.dtype))
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
        logits = _finite(logits + bias)
    attention = logits.softmax(-1).to(value.dtype)
    if probabilities is not None:
        attention = probabilities(attention)
    elif dropout:
        attention = functional.dropout(attention, dropout)
    out = attention @ value
    for encoding in value_encodings:
        addition = through_call(encoding, PositionEncoding.value, attention, context)
        out = out if addition is None else out + addition
    return out


def cast_once(states: Tensor) -> Tensor:
    """Cast states (B, N, width) to autocast's type on a GPU, once for all layers."""
    device_type = states.device.type
    if on_gpu(states) and torch.is_autocast_enabled(device_type) and states.dtype == torch.float32:
        return states.to(torch.get_autocast_dtype(device_type))
    return states


def mask_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean mask, True = may be attended to, into a bias of the same shape."""
    # Not -inf: a row without keys gives a mean, not NaN.
    lowest = torch.finfo(dtype).min
    # Lowest - lowest * mask, in one kernel: its constant is an argument, not a tensor to be filled.
    return torch.add(torch.tensor(lowest, dtype=dtype, device="cpu"), mask, alpha=-lowest)


def _finite(logits: Tensor) -> Tensor:
    # In float16 a sum with the lowest number is -inf.
    if logits.dtype != torch.float16:
        return logits
    return logits.clamp(min=torch.finfo(logits.dtype).min)


def _using(encodings: Iterable[nn.Module], hook: str) -> list[nn.Module]:
    return [encoding for encoding in encodings if hook in hooks_of(encoding)]


class Attention(nn.Module):
    """Self- or cross-attention on (batch, tokens, width) states.

    Args:
        heads: attention heads; divide the width.
        output: whether an output projection follows (not in the cross-attention of layout `ace`).
        positions: encodings with `inputs`, `rotate`, `bias` and `value` hooks.
        fused: see `attend`; where it allows it, ACE-RPE without others has a kernel
            (`vlp.positions.anchor_attention`).

    On the explicit path the probabilities (batch, heads, queries, keys) pass through the submodule
    `probabilities`, where a forward hook may read or replace them.
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
                    f"{type(encoding).__name__} acts on tokens, for which attention has no place"
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
        """Attend from `states` to `context_states` (to themselves when None).

        Args:
            states: (B, Q, width).
            context_states: (B, K, width) or None.
            mask: (B, K) bool, True = may be attended to.
            context: for the hooks; see `attend`.
            projected: keys and values, (B, K, width) each, in place of `context_states`, where
                `shares_keys`.

        Returns:
            (B, Q, width).
        """
        context = NO_CONTEXT if context is None else context
        states = cast_once(states)
        source = states if context_states is None else cast_once(context_states)
        if self._uses_kernel(states):
            (encoding,) = self.positions
            out = through_call(
                encoding,
                PositionEncoding.attend,
                self.query(states),
                self.key(source),
                self.value(source),
                self._weights(),
                mask,
                context,
                self.scale,
            )
            return out if self.output is None else self.output(out)
        query, key, value = self._project_inputs(states, source, projected, context)
        out = attend(
            self.by_head(query),
            self.by_head(key),
            self.by_head(value),
            self.positions,
            context,
            None if mask is None else mask_bias(mask, query.dtype)[:, None, None, :],
            self.fused,
            probabilities=self.probabilities,
            scale=self.scale,
        )
        return self.joined(out)

    def by_head(self, states: Tensor) -> Tensor:
        """Split heads: (B, T, width) -> (B, heads, T, head width)."""
        return states.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def joined(self, out: Tensor) -> Tensor:
        """Join (B, heads, T, head width) -> (B, T, width), with the output projection if any."""
        states = out.transpose(1, 2).flatten(-2)
        return states if self.output is None else self.output(states)

    def _project_inputs(
        self,
        states: Tensor,
        source: Tensor,
        projected: tuple[Tensor, Tensor] | None,
        context: PositionContext,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, (B, tokens, width) each, after the hooks `inputs`."""
        query = states
        key, value = (source, source) if projected is None else projected
        if projected is not None:
            context = replace(context, projections=(self.key.weight, self.value.weight))
        for encoding in _using(self.positions, "inputs"):
            query, key, value = through_call(
                encoding, PositionEncoding.inputs, query, key, value, context
            )
        # Queries first: gradients add up in the order of these products.
        query = self.query(query)
        return (query, key, value) if projected else (query, self.key(key), self.value(value))

    def project(self, context_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of (B, K, width), the same shape, for calls that share them."""
        return self.key(context_states), self.value(context_states)

    @property
    def shares_keys(self) -> bool:
        """Tell whether calls may share projected keys and values, and pass some of the queries."""
        return all(offers(encoding, "shares_keys") for encoding in self.positions)

    def kernel_terms(self, states: Tensor) -> Tensor | None:
        """Return the `kernel_terms` of `PositionContext` for calls with these states, or None."""
        if not self._uses_kernel(states):
            return None
        (encoding,) = self.positions
        return through_call(encoding, PositionEncoding.kernel_terms, self._weights())

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query.weight, self.key.weight, self.value.weight

    def _uses_kernel(self, states: Tensor) -> bool:
        """Tell whether a kernel of the encoding (ACE-RPE's) computes this attention as a whole."""
        kernels = [encoding for encoding in self.positions if offers(encoding, "has_kernel")]
        if not kernels or not on_gpu(states) or self.fused is False:
            return False
        # SDPA has no need of probabilities either.
        if hooks_of(kernels[0]) == {"inputs"}:
            return False
        only_encoding = len(self.positions) == 1 and type(self.probabilities) is nn.Identity
        width = self.query.out_features // self.heads
        fits = only_encoding and width <= 256 and states.dtype != torch.float64 and has_triton()
        if not fits:
            _log_explicit(width, len(self.positions), states.dtype)
        return fits


@once
def _log_explicit(width: int, encodings: int, dtype: torch.dtype) -> None:
    logger.info(
        "attention with ACE-RPE runs unfused: its kernel needs Triton, %s, and it alone in the "
        "layer; here are heads of width %d, %s and %d encodings",
        "heads of at most 256 channels, no float64", width, dtype, encodings,
    )  # fmt: skip
