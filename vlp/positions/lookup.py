"""Terms of attention from rows of a table, without a vector per pair of tokens.

`ids` are int64 (tables, T, T): row ids[t, i, j] belongs to query i and key j. Terms of several
tables are added.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from vlp.positions.base import PositionContext, PositionEncoding
from vlp.precision import at_least_float32


class Lookup(NamedTuple):
    """Term of the logits that is computed per token and table row, and read by pair of tokens.

    Args:
        per_row: values (batch or 1, heads or 1, T or 1, rows) of queries.
        ids: (tables, T, T), query by key; None: the only row for all pairs.
        of_keys: the values are of keys.
    """

    per_row: Tensor
    ids: Tensor | None
    of_keys: bool = False

    def dense(self) -> Tensor:
        """Return the term of every pair; broadcasts to (batch, heads, T, T)."""
        if self.ids is None:
            return self.per_row.mT if self.of_keys else self.per_row
        # Values that are the same for all tokens.
        if self.per_row.shape[-2] == 1:
            return _sum(self.per_row[..., 0, :][..., table_ids] for table_ids in self.ids.unbind())
        ids = self.ids.mT if self.of_keys else self.ids
        # Not `shape[-1]`, which fails under torch.compile(dynamic=True) where ids are constant.
        shape = (*self.per_row.shape[:-1], ids.size(-1))
        terms = _sum(self.per_row.gather(-1, table_ids.expand(shape)) for table_ids in ids.unbind())
        return terms.mT if self.of_keys else terms


class LookupPosition(PositionEncoding):
    """Base of encodings with a bias that is a sum of lookups."""

    def lookups(self, query: Tensor, key: Tensor, context: PositionContext) -> list[Lookup]:
        """Return the terms of the bias."""
        raise NotImplementedError

    def bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor:
        """Sum the lookups in the dtype of `query`; broadcasts to (batch, heads, T, T)."""
        lookups = self.lookups(query, key, context)
        return _sum(lookup.dense() for lookup in lookups).to(query.dtype)


def products(
    states: Tensor, table: Tensor, ids: Tensor, scale: float, of_keys: bool = False
) -> Lookup:
    """Look up products of a token's state and a pair's row: scale * states_i . table[ids_ij].

    Args:
        states: (batch, heads, T, channels), of queries or keys.
        table: (1 or heads, rows, channels).
        ids: (tables, T, T), query by key.
        of_keys: `states` are keys: scale * states_j . table[ids_ij].
    """
    # Computed per row, then read by pair (iRPE Eqs 27, 28): a table has fewer rows than keys.
    per_row = states @ table.to(states.dtype).transpose(-2, -1)
    return Lookup(at_least_float32(per_row) * scale, ids, of_keys)


def attended_rows(attention: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """Return sum_j attention_ij table[ids_ij], (batch, heads, T, channels), in attention's dtype.

    Args:
        attention: (batch, heads, T, T).
        table: (1 or heads, rows, channels).
        ids: (tables, T, T), query by key.
    """
    # In float32, as bfloat16 sums of many small numbers stop growing on GPUs.
    weights = at_least_float32(attention)
    per_row = weights.new_zeros(*weights.shape[:-1], table.shape[1])
    for table_ids in ids.unbind():
        per_row = per_row.scatter_add(-1, table_ids.expand_as(weights), weights)
    return per_row.to(attention.dtype) @ table.to(attention.dtype)


def _sum(terms: Iterable[Tensor]) -> Tensor:
    return functools.reduce(lambda a, b: a + b, terms)
