"""`huang`: one vector per clipped offset, multiplied with queries and keys (Huang et al. 2020)."""

from __future__ import annotations

from torch import Tensor

from vlp.positions.base import PositionContext
from vlp.positions.clipped import ClippedPosition, Offsets
from vlp.positions.lookup import Lookup, products


class HuangPosition(ClippedPosition):
    """Relative positions of Huang et al. 2020, on images as iRPE compares them (Eq. 11).

    On images p_ij is a row of iRPE's product method with the clip function, shared by all heads
    (supplement 4, papers.md#irpe-i15): this is `irpe-product` with function "clip" and one table
    for queries and keys. With the default reach it has the 7 x 7 + 1 = 50 rows of Table 5's costs.

    The options are explained in `ClippedPosition`.
    """

    NO_WEIGHT_DECAY = ("table",)
    causal = True

    def __init__(
        self,
        width: int,
        heads: int,
        grid: tuple[int, int] | None = None,
        offsets: Offsets = "product",
        reach: int | None = 3,
        shared_heads: bool = True,
        prefix_bucket: bool = True,
    ) -> None:
        super().__init__("huang", width, heads, grid, offsets, reach, shared_heads, prefix_bucket)
        self.table = self._table(self.head_width)

    def lookups(self, query: Tensor, key: Tensor, context: PositionContext) -> list[Lookup]:
        """Return the terms of Eq. 11: (q_i . p_ij + k_j . p_ij) / sqrt(head width)."""
        # The printed numerator is (q_i + p_ij)(k_j + p_ij) - p_ij p_ij; the squares cancel.
        ids = self._ids(context, query.shape[-2], key.shape[-2], query.device)
        return [
            products(query, self.table, ids, self.scale),
            products(key, self.table, ids, self.scale, of_keys=True),
        ]
