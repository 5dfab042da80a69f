"""Rows of a table read at every pair of tokens, without a vector per pair.

Row ids[i, j] belongs to query i and key j. `ids` are int64 (tables, T, T), rows of one table; a
pair's rows of several tables are added up.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from vlp.positions.base import PositionContext, PositionEncoding
from vlp.precision import at_least_float32


class Lookup(NamedTuple):
    """A term of the logits that every pair reads from numbers of one of its tokens.

    Args:
        per_row: (batch or 1, heads or 1, T or 1, rows).
        ids: (tables, T, T), query before key; None: the only row, whatever the pair.
        of_keys: the numbers are key j's, not query i's.
    """

    per_row: Tensor
    ids: Tensor | None
    of_keys: bool = False

    def dense(self) -> Tensor:
        """Return the term of every pair; broadcasts to (batch, heads, T, T)."""
        if self.ids is None:
            return self.per_row.mT if self.of_keys else self.per_row
        # Scalars are the same for all tokens.
        if self.per_row.shape[-2] == 1:
            return _sum(self.per_row[..., 0, :][..., pairs] for pairs in self.ids.unbind())
        ids = self.ids.mT if self.of_keys else self.ids
        # Not `shape[-1]`, which fails under torch.compile(dynamic=True) where ids are constant.
        shape = (*self.per_row.shape[:-1], ids.size(-1))
        terms = _sum(self.per_row.gather(-1, pairs.expand(shape)) for pairs in ids.unbind())
        return terms.mT if self.of_keys else terms


class LookupPosition(PositionEncoding):
    """Base of encodings with a bias of lookups alone; a subclass writes `lookups`."""

    def lookups(self, query: Tensor, key: Tensor, context: PositionContext) -> list[Lookup]:
        """Return the terms of the bias."""
        raise NotImplementedError

    def bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor:
        """Return the sum of all lookups, in the queries' type; broadcasts to (B, heads, T, T)."""
        return dense(self.lookups(query, key, context)).to(query.dtype)


def dense(lookups: Iterable[Lookup]) -> Tensor:
    """Return the sum of lookups for every pair; broadcasts to (batch, heads, T, T)."""
    return _sum(lookup.dense() for lookup in lookups)


def products(
    states: Tensor, table: Tensor, ids: Tensor, scale: float = 1.0, of_keys: bool = False
) -> Lookup:
    """Look up products of a token's state and a pair's rows: scale * states_i . table[ids_ij].

    Args:
        states: (batch, heads, T, channels), of queries or keys.
        table: (1 or heads, rows, channels).
        ids: (tables, T, T), query before key.
        of_keys: states are the keys': scale * states_j . table[ids_ij].
    """
    # Formed per row and then spread over the pairs (iRPE Eqs 27, 28): rows are fewer than keys.
    per_row = states @ table.to(states.dtype).transpose(-2, -1)
    return Lookup(at_least_float32(per_row) * scale, ids, of_keys)


def scalars(table: Tensor, ids: Tensor, scale: float = 1.0) -> Lookup:
    """Look up a scalar of every pair, scale * table[ids_ij].

    `table` is (1 or heads, rows), `ids` (tables, T, T).
    """
    return Lookup(at_least_float32(table)[None, :, None] * scale, ids)


def attended_rows(attention: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """Return sum_j attention_ij table[ids_ij], (batch, heads, T, channels), of attention's dtype.

    Args:
        attention: (batch, heads, T, T).
        table: (1 or heads, rows, channels).
        ids: (tables, T, T).
    """
    # On GPUs bfloat16 sums of many small numbers stop growing.
    weights = at_least_float32(attention)
    per_row = weights.new_zeros(*weights.shape[:-1], table.shape[1])
    for pairs in ids.unbind():
        per_row = per_row.scatter_add(-1, pairs.expand_as(weights), weights)
    return per_row.to(attention.dtype) @ table.to(attention.dtype)


def _sum(terms: Iterable[Tensor]) -> Tensor:
    return functools.reduce(lambda a, b: a + b, terms)
