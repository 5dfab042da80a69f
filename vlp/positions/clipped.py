"""Tables indexed by clipped offsets, as in the encodings before iRPE."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from vlp.positions.base import PositionContext, cached_constant
from vlp.positions.buckets import Method, bucket_ids, table_size
from vlp.positions.coordinates import require_grid_tokens, require_patches
from vlp.positions.lookup import LookupPosition
from vlp.positions.options import head_width, require_choice

Offsets = Literal["product", "axes", "raster"]

_METHODS: dict[Offsets, Method] = {"product": "product", "axes": "cross", "raster": "cross"}


def clipped_ids(
    offsets: Offsets, height: int, width: int, reach: int, prefix_tokens: int = 0
) -> tuple[Tensor, int]:
    """Return every pair's table row for clipped offsets, query minus key (iRPE Eq. 9).

    Args:
        offsets: "product", a row for each pair of vertical and horizontal offset, as iRPE's
            supplement 4 adapts 1D encodings to images (papers.md#irpe-i9, #irpe-i15); "axes", a
            table for either axis; or "raster", a row for each offset in raster order.
        reach: k of Eq. 9, in patches; for raster in tokens.
        prefix_tokens: tokens without a position before the patches; every pair with a prefix token
            has the last id, size - 1 (papers.md#irpe-i10).

    Returns:
        ids: int64 (tables, T, T) with T = prefix + height * width, from 0 on in each table; two
            tables for axes, vertical then horizontal, otherwise one.
        size: number of rows of a table.
    """
    size = clipped_size(offsets, reach, prefix_tokens)
    require_patches(offsets, (height, width))
    # A sequence is a grid of one row.
    if offsets == "raster":
        height, width = 1, height * width
    # iRPE's clip function reaches beta = 2 ratio.
    ids, _ = bucket_ids(_METHODS[offsets], height, width, reach / 2, "clip", prefix_tokens)
    if offsets == "product":
        return ids[None], size
    # Of the rows and columns of `cross`, a sequence has columns only.
    return (ids if offsets == "axes" else ids[1:]), size


def clipped_size(offsets: Offsets, reach: int, prefix_tokens: int = 0) -> int:
    """Return the rows of one table: 2 reach + 1, squared for product, plus one for a prefix."""
    require_choice("offsets", offsets, get_args(Offsets))
    if reach < 1 or reach != int(reach):
        raise ValueError(f"the reach of clipped offsets must be a whole number from 1 on: {reach}")
    return table_size(_METHODS[offsets], reach / 2, prefix_tokens)


def longest_offset(offsets: Offsets, grid: tuple[int, int]) -> int:
    """Return the smallest reach, at least 1, that clips no offset on a grid (rows, columns)."""
    return max((grid[0] * grid[1] if offsets == "raster" else max(grid)) - 1, 1)


class ClippedPosition(LookupPosition):
    """Base of encodings with a table row per clipped offset; one table serves every grid.

    Offsets are clipped to the reach on each axis, and pairs with prefix tokens have a row
    (papers.md#irpe-i10). Tables start at zero, at which the layer's function is unchanged.

    Args:
        name: of the encoding, for error messages.
        width, heads: channels and attention heads of the layer.
        grid: (rows, columns) if the context has no grid; required if `reach` is None.
        offsets: "product", for patches, "raster", for a sentence or for patches as a sequence, or
            "axes"; one of the class's OFFSETS (`clipped_ids`).
        reach: the longest offset of an axis, in patches, that is not clipped; None: the longest
            offset of `grid`.
        shared_heads: one table for all heads.
        prefix_bucket: whether the table has a row for pairs with prefix tokens
            (papers.md#irpe-i10).
    """

    OFFSETS: ClassVar[tuple[Offsets, ...]] = ("product", "raster")

    def __init__(
        self,
        name: str,
        width: int,
        heads: int,
        grid: tuple[int, int] | None,
        offsets: Offsets,
        reach: int | None,
        shared_heads: bool,
        prefix_bucket: bool,
    ) -> None:
        super().__init__()
        require_choice(f"{name} offsets", offsets, self.OFFSETS)
        if grid is not None:
            require_patches(name, grid)
        if reach is None:
            if grid is None:
                raise ValueError(f"{name} needs the option reach, or a grid that determines it")
            reach = longest_offset(offsets, grid)
        self.name, self.grid, self.offsets, self.reach = name, grid, offsets, reach
        self.head_width = head_width(name, width, heads)
        self.scale = self.head_width**-0.5
        self.table_heads = 1 if shared_heads else heads
        self.prefix_bucket = prefix_bucket
        try:
            self.size = clipped_size(offsets, reach, int(prefix_bucket))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def _table(self, channels: int) -> nn.Parameter:
        # At zero the layer's function is unchanged.
        return nn.Parameter(torch.zeros(self.table_heads, self.size, channels))

    def _ids(
        self, context: PositionContext, queries: int, keys: int, device: torch.device
    ) -> Tensor:
        """Return the table rows of all pairs of tokens, (tables, T, T)."""
        grid = require_grid_tokens(self.name, context, self.grid, queries, keys, self.prefix_bucket)
        return cached_ids(device, self.offsets, *grid, self.reach, context.prefix_tokens)


@cached_constant(maxsize=32)
def cached_ids(
    device: torch.device, offsets: Offsets, height: int, width: int, reach: int, prefix_tokens: int
) -> Tensor:
    """Return `clipped_ids` on a device, shared by all layers."""
    return clipped_ids(offsets, height, width, reach, prefix_tokens)[0].to(device)
