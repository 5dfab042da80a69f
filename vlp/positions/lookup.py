"""Rows of a table read at every pair of tokens, without a vector per pair.

Pairs of tokens share the rows of a table: row ids[i, j] belongs to query i and key j. As there are
fewer rows than keys, products are formed per row and then spread over the pairs, and attention is
first summed per row (iRPE Eqs 27, 28): the tensor (T, T, head width) never exists.

`ids` are int64 (tables, T, T), rows of one table; where there are several, the rows that a pair
reads are added up. Sums over many pairs run in float32 at least: on GPUs, bfloat16 sums of many
small numbers stop growing.
"""

from __future__ import annotations

import functools

from torch import Tensor


def pair_products(states: Tensor, table: Tensor, ids: Tensor, scale: float = 1.0) -> Tensor:
    """The product of state i with the rows of pair i, j: scale * states_i . table[ids_ij].

    For states of keys, hand in the transposed ids and transpose the result.

    Args:
        states: (batch, heads, T, channels).
        table: (1 or heads, rows, channels).
        ids: (tables, T, T).
        scale: factor of the result.

    Returns:
        (batch, heads, T, T), half precision as float32.
    """
    per_row = states @ table.to(states.dtype).transpose(-2, -1)
    per_row = _at_least_float32(per_row) * scale
    shape = (*per_row.shape[:-1], ids.shape[-1])
    return _sum([per_row.gather(-1, pairs.expand(shape)) for pairs in ids.unbind()])


def pair_scalars(table: Tensor, ids: Tensor, scale: float = 1.0) -> Tensor:
    """The scalar of every pair: scale * table[ids_ij].

    Args:
        table: (1 or heads, rows).
        ids: (tables, T, T).
        scale: factor of the result.

    Returns:
        (1, 1 or heads, T, T).
    """
    return _sum([table[None, :, pairs] for pairs in ids.unbind()]) * scale


def attended_rows(attention: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """What query i attends to, in rows of the table: sum_j attention_ij table[ids_ij].

    Args:
        attention: (batch, heads, T, T).
        table: (1 or heads, rows, channels).
        ids: (tables, T, T).

    Returns:
        (batch, heads, T, channels), of attention's dtype.
    """
    weights = _at_least_float32(attention)
    per_row = weights.new_zeros(*weights.shape[:-1], table.shape[1])
    for pairs in ids.unbind():
        per_row = per_row.scatter_add(-1, pairs.expand_as(weights), weights)
    return per_row.to(attention.dtype) @ table.to(attention.dtype)


def _sum(terms: list[Tensor]) -> Tensor:
    return functools.reduce(lambda one, other: one + other, terms)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.element_size() < 4 else x
