"""`sasa`: vectors of the horizontal and the vertical offset side by side (Ramachandran 2019)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from vlp.positions.base import PositionContext
from vlp.positions.clipped import ClippedPosition, Offsets
from vlp.positions.lookup import Lookup, products


def sasa_lookups(query: Tensor, table_x: Tensor, table_y: Tensor, ids: Tensor) -> list[Lookup]:
    """Return q_i . concat(p_dx, p_dy) / sqrt(channels), x = column first (iRPE Eq. 12,
    papers.md#irpe-i16).

    Args:
        query: (batch, heads, T, channels).
        table_x: (1 or heads, rows of the table, channels / 2), of horizontal offsets.
        table_y: the same of vertical offsets.
        ids: int64 (2, T, T), ids of vertical, then of horizontal offsets.
    """
    scale = query.shape[-1] ** -0.5
    # Each half of the query meets its own table, so that nothing is concatenated per pair.
    horizontal, vertical = query.chunk(2, -1)
    return [
        products(horizontal, table_x, ids[1:], scale),
        products(vertical, table_y, ids[:1], scale),
    ]


class SasaPosition(ClippedPosition):
    """Relative positions of stand-alone self-attention, on keys as iRPE compares them (Eq. 12).

    Offsets along x and along y read a table each, of half the head width, and their vectors stand
    side by side. By default nothing is clipped on the trained grid: iRPE takes the encoding as it
    is (supplement 4), and its cost in Table 5 (4,639M) counts all 27 offsets per axis on 14 x 14
    patches. Both axes reach equally far, so that a trained landscape serves a portrait.

    On a larger grid, offsets beyond the reach share the row of the furthest one, axis by axis.
    Pairs with prefix tokens have a row in each table (papers.md#irpe-i10). Tables start at zero,
    which leaves the layer as it was.

    Args:
        width, heads: channels and attention heads of the layer.
        grid: (rows, columns) of training; also where the context has no grid.
        reach: the longest offset that has its own row, in patches; None: the longest one of `grid`.
        shared_heads: the same two tables for all heads.
        prefix_bucket: whether the tables have a row for pairs with prefix tokens.
    """

    NO_WEIGHT_DECAY = ("table_x", "table_y")
    causal = True

    OFFSETS: ClassVar[tuple[Offsets, ...]] = ("axes",)

    def __init__(
        self,
        width: int,
        heads: int,
        grid: tuple[int, int] | None = None,
        reach: int | None = None,
        shared_heads: bool = True,
        prefix_bucket: bool = True,
    ) -> None:
        super().__init__("sasa", width, heads, grid, "axes", reach, shared_heads, prefix_bucket)
        if self.head_width % 2:
            raise ValueError(f"sasa: head width {self.head_width} has no halves for x and y")
        # The paper does not say whether heads share the tables; they do by default.
        self.table_x = self._table(self.head_width // 2)
        self.table_y = self._table(self.head_width // 2)

    def lookups(self, query: Tensor, key: Tensor, context: PositionContext) -> list[Lookup]:
        """Return `sasa_lookups` of one layer."""
        ids = self._ids(context, query.shape[-2], key.shape[-2], query.device)
        return sasa_lookups(query, self.table_x, self.table_y, ids)
