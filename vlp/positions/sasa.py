"""`sasa`: concatenated vectors of the horizontal and the vertical offset (Ramachandran 2019)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from vlp.positions.base import PositionContext
from vlp.positions.clipped import ClippedPosition, Offsets
from vlp.positions.lookup import Lookup, products


class SasaPosition(ClippedPosition):
    """Relative positions of stand-alone self-attention, on keys as iRPE compares them (Eq. 12).

    Horizontal and vertical offsets have a table each, of half the head width, and their vectors are
    concatenated. By default no offset of the trained grid is clipped, as iRPE adapts the encoding
    (supplement 4): its cost in Table 5 (4,639M) counts all 27 offsets per axis on 14 x 14 patches.
    Both axes have the same reach, so that tables trained on landscape images fit portraits.

    The options are explained in `ClippedPosition`.
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
            raise ValueError(f"sasa: head width {self.head_width} is not even, for halves x and y")
        # The paper leaves open whether heads share the tables.
        self.table_x = self._table(self.head_width // 2)
        self.table_y = self._table(self.head_width // 2)

    def lookups(self, query: Tensor, key: Tensor, context: PositionContext) -> list[Lookup]:
        """Return q_i . concat(p_dx, p_dy) / sqrt(head width) (Eq. 12, papers.md#irpe-i16)."""
        ids = self._ids(context, query.shape[-2], key.shape[-2], query.device)
        # Halves of the query are multiplied with either table: nothing is concatenated per pair.
        query_x, query_y = query.chunk(2, -1)
        return [
            products(query_x, self.table_x, ids[1:], self.scale),
            products(query_y, self.table_y, ids[:1], self.scale),
        ]
