"""Attention that reads its biases from tables inside PyTorch's FlexAttention.

Beside the logits of fused attention a dense bias (batch, heads, T, T) is written, read, and its
gradient written and read again. Here the kernel looks the numbers up while it computes a block of
logits, and only (batch, heads, T, rows) lies in memory.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from vlp.compilation import once
from vlp.positions.base import hooks_of, offers
from vlp.positions.lookup import Lookup

logger = logging.getLogger(__name__)

BLOCKS: Any = {
    "BLOCK_M": 64,
    "BLOCK_N": 64,
    "BLOCK_M1": 32,
    "BLOCK_N1": 64,
    "BLOCK_M2": 64,
    "BLOCK_N2": 32,
}
"""Queries and keys of a block in half precision, forward and in both halves of the backward pass.

Beside them the kernel holds a block of ids and of looked up numbers for each term: PyTorch's own
sizes, up to 128, take more shared memory than an H100 has. Those of float32 are small enough.
"""


def flex_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lookups: Sequence[Lookup],
    scale: float | None = None,
) -> Tensor:
    """softmax(scale q k^T + lookups) v; compiled on a GPU for each form of inputs, and fused.

    On a CPU it runs unfused, which is logged, and FlexAttention differentiates there by the lookups
    alone.

    Args:
        query: (B, heads, T, head width), scaled here.
        key: the same.
        value: the same.
        lookups: terms of the logits.
        scale: of the products of queries and keys; None: 1 / sqrt(head width).

    Returns:
        (B, heads, T, head width).

    Raises:
        RuntimeError: on a GPU it cannot be compiled into one kernel (from PyTorch).
    """
    terms = [term for lookup in lookups for term in _terms(lookup, (*query.shape[:3], -1))]

    def add(logit: Tensor, batch: Tensor, head: Tensor, asks: Tensor, answers: Tensor) -> Tensor:
        for per_row, pairs, of_keys in terms:
            token = answers if of_keys else asks
            row = 0 if pairs is None else pairs[asks, answers]
            logit = logit + per_row[batch, head, token, row]
        return logit

    if torch.compiler.is_compiling():  # part of the graph around it
        from torch.nn.attention.flex_attention import flex_attention as kernel
    elif query.device.type == "cpu":
        kernel = _unfused()
    else:
        kernel = _compiled(_form(query, key, value, terms, scale))
    options = BLOCKS if query.element_size() == 2 else None
    out: Tensor = kernel(query, key, value, score_mod=add, scale=scale, kernel_options=options)
    return out


def _terms(lookup: Lookup, shape: tuple[int, ...]) -> list[Lookup]:
    """Split a lookup into terms of one table each, whose ids are (T, T), int32.

    The kernel holds blocks of ids. Every term has a view of the numbers of its own, as the kernel
    has a gradient of a tensor only where it is read once.
    """
    tables = [None] if lookup.ids is None else lookup.ids.int().unbind()
    return [lookup._replace(per_row=lookup.per_row.expand(shape), ids=ids) for ids in tables]


NO_LOOKUPS = "no encoding adds lookups to the logits"


def departure(encodings: Iterable[nn.Module], bias: bool, dropout: bool) -> str | None:
    """Return why attention cannot be that of `flex_attend`, None where it can.

    Args:
        encodings: all of the layer; what is in a wrapper is not looked up by the kernel.
        bias: whether anything else is added to the logits, such as a mask.
        dropout: whether probabilities are dropped.
    """
    looks_up = False
    for encoding in encodings:
        name, hooks = type(encoding).__name__, hooks_of(encoding)
        if "value" in hooks:
            return f"{name} reads the probabilities"
        if "bias" in hooks and not offers(encoding, "has_lookups"):
            return f"{name} adds to the logits what is no lookup"
        looks_up = looks_up or "bias" in hooks
    if not looks_up:
        return NO_LOOKUPS
    if bias:
        return "a mask or a bias beside the encodings is added to the logits"
    return "probabilities are dropped" if dropout else None


@once
def log_departure(reason: str) -> None:
    """Say that attention departs from `flex_attend`, once for each reason."""
    logger.warning("attention runs without FlexAttention, because %s", reason)


@functools.cache
def _compiled(form: Hashable) -> Callable[..., Any]:
    """Return FlexAttention compiled for one form of its inputs.

    The compiler counts forms by code object, and beyond its limit of them runs a function
    unfused without a word. So every form compiles a code object of its own; one that recompiles
    beyond the limit all the same is an error, because of `fullgraph`.
    """
    from torch.nn.attention.flex_attention import flex_attention  # takes half a second

    own = FunctionType(flex_attention.__code__.replace(), flex_attention.__globals__)
    own.__kwdefaults__, own.__defaults__ = (
        flex_attention.__kwdefaults__,
        flex_attention.__defaults__,
    )
    return torch.compile(own, dynamic=False, fullgraph=True)


@functools.cache
def _unfused() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    logger.warning("FlexAttention runs unfused on a CPU")

    def attend(*arguments: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            return flex_attention(*arguments, **options)

    return attend


def _form(
    query: Tensor, key: Tensor, value: Tensor, terms: Sequence[Lookup], scale: float | None
) -> Hashable:
    """Return what a compiled form depends on."""

    def of(x: Tensor | None) -> Hashable:
        return x is not None and (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)

    tables = tuple((of(per_row), of(ids), of_keys) for per_row, ids, of_keys in terms)
    return of(query), of(key), of(value), tables, scale, torch.is_grad_enabled()
