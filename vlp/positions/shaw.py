"""`shaw`: learned vectors of clipped offsets on keys and values (Shaw et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from vlp.positions.base import PositionContext
from vlp.positions.clipped import ClippedPosition, Offsets
from vlp.positions.lookup import Lookup, attended_rows, products

ROLES = ("key", "value")


class ShawPosition(ClippedPosition):
    """Relative positions of Shaw et al. 2018, on images as iRPE compares them (Eqs 7-9).

    It adds q_i p^K_ij / sqrt(head width) to the logits (Eq. 8) and sum_j a_ij p^V_ij to the output
    (Eq. 7). On images p_ij is a row of iRPE's product method with the clip function, shared by all
    heads (supplement 4, papers.md#irpe-i15): this is `irpe-product` with function "clip" on keys
    and values. With the default reach it has the 7 x 7 + 1 = 50 rows of the paper's product method.
    The costs in its Table 5 (4,659M) count keys alone: `roles=("key",)`.

    Args:
        roles: which of key, value have positions.
        reach: k of Eq. 9: the longest offset of an axis, in patches, that is not clipped; None: the
            longest offset of `grid`.
    """

    NO_WEIGHT_DECAY = ("tables",)
    causal = True

    def __init__(
        self,
        width: int,
        heads: int,
        grid: tuple[int, int] | None = None,
        roles: Sequence[str] = ROLES,
        offsets: Offsets = "product",
        reach: int | None = 3,
        shared_heads: bool = True,
        prefix_bucket: bool = True,
    ) -> None:
        super().__init__("shaw", width, heads, grid, offsets, reach, shared_heads, prefix_bucket)
        if not roles or set(roles) - set(ROLES):
            raise ValueError(f"shaw: roles {tuple(roles)} are not some of {ROLES}")
        self.roles = tuple(role for role in ROLES if role in roles)
        self.tables = nn.ParameterDict({role: self._table(self.head_width) for role in self.roles})

    @property
    def hooks(self) -> frozenset[str]:
        """Return the hooks of the roles."""
        # Without the hook `value` attention may be fused.
        return frozenset({"key": "bias", "value": "value"}[role] for role in self.roles)

    def lookups(self, query: Tensor, key: Tensor, context: PositionContext) -> list[Lookup]:
        """Return q_i p^K_ij / sqrt(head width) (Eq. 8)."""
        ids = self._ids(context, query.shape[-2], key.shape[-2], query.device)
        return [products(query, self.tables["key"], ids, self.scale)]

    def value(self, attention: Tensor, context: PositionContext) -> Tensor:
        """Return sum_j a_ij p^V_ij (Eq. 7), (B, heads, T, head width)."""
        ids = self._ids(context, attention.shape[-2], attention.shape[-1], attention.device)
        return attended_rows(attention, self.tables["value"], ids)
