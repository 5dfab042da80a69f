"""iRPE in self-attention: bias and contextual mode on queries, keys and values (Eqs 13-17)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vlp.positions.base import PositionContext, cached_constant
from vlp.positions.buckets import IndexFunction, Method, Universe, Variant, bucket_ids, table_size
from vlp.positions.coordinates import grid_size, require_grid_tokens
from vlp.positions.lookup import Lookup, LookupPosition, attended_rows, products
from vlp.positions.options import head_width, require_choice, require_defaults
from vlp.precision import at_least_float32

ROLES = ("query", "key", "value")


class RelativePosition(LookupPosition):
    """Image relative position encoding of one self-attention layer (Wu et al. 2021).

    Each role has a table r (1 or heads, rows, head width), in bias mode (1 or heads, rows).
    Contextual mode adds q_i r^K_ij and k_j r^Q_ij to the logits before they are scaled (Eqs 15, 16)
    and sum_j a_ij r^V_ij to the output (Eq. 17); bias mode adds scalars (Eqs 13, 14). A table fits
    every grid, except for quantization by rank on the grid (papers.md#irpe-i6). Tables start at
    zero, at which the layer's function is unchanged. A sentence is a grid of one row.

    Args:
        method: euclidean, quantization, cross or product.
        width, heads: channels and attention heads of the layer.
        grid: (rows, columns) where the context has no grid; quantization by rank is bound to it.
        mode: "contextual" or "bias".
        roles: which of query, key, value have positions; bias mode excludes values
            (papers.md#irpe-i14).
        shared_heads: one table for all heads, as in the paper's final models (papers.md#irpe-i13).
        ratio: determines the rows of a table, see `bucket_ids`; with 1.9 product has 50 rows.
        function: "piecewise" or "clip".
        prefix_bucket: whether pairs with prefix tokens have a row (papers.md#irpe-i10).
        q_ids_transposed: cross and product only; read the query table at [j, i], as the authors'
            code does (papers.md#irpe-i11).
        bias_inside_scale: bias mode only; divide the bias by sqrt(head width) as in Eq. 13, unlike
            the authors' code (papers.md#irpe-i12).
        pre_round, variant, universe: see `bucket_ids`.
    """

    NO_WEIGHT_DECAY = ("tables",)
    causal = True

    def __init__(
        self,
        method: Method,
        width: int,
        heads: int,
        grid: tuple[int, int] | None = None,
        mode: str = "contextual",
        roles: Sequence[str] = ("key",),
        shared_heads: bool = True,
        ratio: float = 1.9,
        function: IndexFunction = "piecewise",
        prefix_bucket: bool = True,
        q_ids_transposed: bool = False,
        bias_inside_scale: bool = True,
        pre_round: bool = False,
        variant: Variant = "rank",
        universe: Universe = "grid",
    ) -> None:
        super().__init__()
        self.name = f"irpe-{method}"
        require_choice(f"{self.name} mode", mode, ("contextual", "bias"))
        if not roles or set(roles) - set(ROLES):
            raise ValueError(f"{self.name}: roles {tuple(roles)} are not some of {ROLES}")
        if mode == "bias" and "value" in roles:
            raise ValueError(f"{self.name}: bias mode has no encoding on values (Eq. 14)")
        if mode != "bias" and not bias_inside_scale:
            raise ValueError(f"{self.name}: bias_inside_scale=False needs mode='bias'")
        channels = head_width(self.name, width, heads)
        self.buckets: dict[str, Any] = {
            "method": method,
            "ratio": ratio,
            "function": function,
            "pre_round": pre_round,
            "variant": variant,
            "universe": universe,
        }
        # Raises for unknown names.
        bucket_ids(height=1, width=1, **self.buckets)
        self._require_effect(roles, q_ids_transposed)
        self.ranks_on_grid = (method, variant, universe) == ("quantization", "rank", "grid")
        if self.ranks_on_grid and grid is None:
            raise ValueError(
                f"{self.name} ranks the distances of one grid: set the option grid, "
                "universe='global' or variant='squared'"
            )
        self.grid = grid
        if self.ranks_on_grid:
            # The table has the same shape on every grid, so the state holds the grid, too.
            self.register_buffer("ranked_grid", torch.tensor(self.grid))
            self.register_load_state_dict_pre_hook(_check_ranked_grid)
        self.mode = mode
        self.roles = tuple(role for role in ROLES if role in roles)
        self.prefix_bucket, self.q_ids_transposed = prefix_bucket, q_ids_transposed
        self.scale = channels**-0.5 if bias_inside_scale else 1.0

        self.size = table_size(method, ratio, int(prefix_bucket))
        # The two tables of `cross` are concatenated, rows, then columns.
        shape = [1 if shared_heads else heads, self.size * (2 if method == "cross" else 1)]
        if mode == "contextual":
            shape.append(channels)
        self.tables = nn.ParameterDict(
            {role: nn.Parameter(torch.zeros(shape)) for role in self.roles}
        )

    def _require_effect(self, roles: Sequence[str], q_ids_transposed: bool) -> None:
        """Raise ValueError for an option that is set but has no effect."""
        require_default = partial(require_defaults, self.name, RelativePosition)
        method, variant = self.buckets["method"], self.buckets["variant"]
        if method != "euclidean":
            require_default("outside of irpe-euclidean", pre_round=self.buckets["pre_round"])
        if method != "quantization":
            require_default("outside of irpe-quantization", variant=variant)
        if (method, variant) != ("quantization", "rank"):
            require_default("if distances are not ranked", universe=self.buckets["universe"])
        if method in ("euclidean", "quantization"):
            require_default("as distances have no direction", q_ids_transposed=q_ids_transposed)
        if "query" not in roles:
            require_default("without the role query", q_ids_transposed=q_ids_transposed)

    @property
    def hooks(self) -> frozenset[str]:
        """Return the hooks of the roles."""
        # Without the hook `value` attention may be fused.
        return frozenset("value" if role == "value" else "bias" for role in self.roles)

    def lookups(self, query: Tensor, key: Tensor, context: PositionContext) -> list[Lookup]:
        """Return the terms of b_ij of keys and of queries, scaled (Eqs 13-16)."""
        ids = self._ids(context, query.shape[-2], key.shape[-2], query.device)
        terms = []
        # The table of the role `key` is multiplied with queries, and vice versa (Eq. 15).
        if "key" in self.roles:
            terms.append(self._lookup(query, "key", ids))
        if "query" in self.roles:
            query_ids = ids.mT if self.q_ids_transposed else ids
            terms.append(self._lookup(key, "query", query_ids, of_keys=True))
        return terms

    def value(self, attention: Tensor, context: PositionContext) -> Tensor:
        """Return sum_j a_ij r^V_ij (Eq. 17), (B, heads, T, head width)."""
        ids = self._ids(context, attention.shape[-2], attention.shape[-1], attention.device)
        return attended_rows(attention, self.tables["value"], ids)

    def _lookup(self, states: Tensor, role: str, ids: Tensor, of_keys: bool = False) -> Lookup:
        """Look up states_i . r[ids_ij], in bias mode r[ids_ij], times the scale (Eqs 27, 28)."""
        if self.mode == "bias":
            return Lookup(at_least_float32(self.tables[role])[None, :, None] * self.scale, ids)
        return products(states, self.tables[role], ids, self.scale, of_keys)

    def _ids(
        self, context: PositionContext, queries: int, keys: int, device: torch.device
    ) -> Tensor:
        """Return the table rows of all pairs of tokens, (tables, T, T)."""
        grid = require_grid_tokens(self.name, context, self.grid, queries, keys, self.prefix_bucket)
        if self.ranks_on_grid and self.grid is not None and grid != self.grid:
            raise ValueError(
                f"{self.name} ranks the distances of a {grid_size(self.grid)} grid and does not "
                f"carry over to {grid_size(grid)}"
            )
        return _cached_ids(
            device,
            self.size,
            height=grid[0],
            width=grid[1],
            prefix_tokens=context.prefix_tokens,
            **self.buckets,
        )


def _check_ranked_grid(
    module: nn.Module, state: dict[str, Tensor], prefix: str, *others: Any
) -> None:
    # A hook before the state is loaded: the table of another grid is an error, but grids of one row
    # have equal ranks.
    assert isinstance(module, RelativePosition)
    grid, name = module.grid, f"{prefix}ranked_grid"
    if grid is None or name not in state or state[name].is_meta:
        return
    rows, columns = state[name].tolist()
    if (rows, columns) != grid and max(rows, grid[0]) > 1:
        error_messages: list[str] = others[-1]  # the last argument of such hooks
        error_messages.append(
            f"{prefix}tables: {module.name} ranks the distances of a {grid_size((rows, columns))} "
            f"grid there and of {grid_size(grid)} here"
        )
    state[name] = torch.tensor(grid)


@cached_constant(maxsize=32)
def _cached_ids(device: torch.device, size: int, **buckets: Any) -> Tensor:
    """Return `bucket_ids` (tables, T, T); ids of a second table continue from the first table.

    size: rows of a table.
    """
    ids, _ = bucket_ids(**buckets)
    if ids.ndim == 2:
        return ids[None].to(device)
    return torch.stack([ids[0], ids[1] + size]).to(device)
