"""Attention that reads its biases from tables inside PyTorch's FlexAttention.

Beside the logits of fused attention a dense bias (batch, heads, T, T) is written, read, and its
gradient written and read again. Here the kernel looks the numbers up while it computes a block of
logits, and only (batch, heads, T, rows) lies in memory.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vlp.positions.lookup import Lookup


def flex_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lookups: Sequence[Lookup],
    scale: float | None = None,
) -> Tensor:
    """softmax(scale q k^T + lookups) v; compiled on a GPU, where it is fused.

    On a CPU it runs unfused, and FlexAttention differentiates there by the lookups alone.

    Args:
        query: (B, heads, T, head width), scaled here.
        key: the same.
        value: the same.
        lookups: terms of the logits.
        scale: of the products of queries and keys; None: 1 / sqrt(head width).

    Returns:
        (B, heads, T, head width).
    """
    whole = (*query.shape[:3], -1)
    terms = [lookup._replace(per_row=lookup.per_row.expand(whole)) for lookup in lookups]

    def add(logit: Tensor, batch: Tensor, head: Tensor, asks: Tensor, answers: Tensor) -> Tensor:
        for per_row, ids, of_keys in terms:
            token = answers if of_keys else asks
            if ids is None:
                logit = logit + per_row[batch, head, token, 0]
                continue
            for pairs in ids.unbind():
                logit = logit + per_row[batch, head, token, pairs[asks, answers]]
        return logit

    out: Tensor = _kernel(query.device.type)(query, key, value, score_mod=add, scale=scale)
    return out


@functools.cache
def _kernel(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention  # takes half a second

    if device != "cpu":
        return torch.compile(flex_attention, dynamic=False)

    def unfused(*arguments: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            return flex_attention(*arguments, **options)

    return unfused
