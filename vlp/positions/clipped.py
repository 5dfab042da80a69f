"""Clipped offsets: the row of a table for every pair, as encodings before iRPE number them."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from vlp.positions.base import PositionContext, cached_constant
from vlp.positions.buckets import Method, bucket_ids, table_size
from vlp.positions.coordinates import require_grid_tokens
from vlp.positions.lookup import LookupPosition
from vlp.positions.options import require_choice

Offsets = Literal["product", "axes", "raster"]

_METHODS: dict[Offsets, Method] = {"product": "product", "axes": "cross", "raster": "cross"}


def clipped_ids(
    offsets: Offsets, height: int, width: int, reach: int, prefix_tokens: int = 0
) -> tuple[Tensor, int]:
    """Return the row of every pair of tokens, offsets clipped to [-reach, reach] (iRPE Eq. 9).

    Offsets are query minus key. `product` is how iRPE's supplement 4 brings 1D encodings to images
    (papers.md#irpe-i9, #irpe-i15); `axes` gives each axis its own id; `raster` takes the patches as
    one sequence.

    Args:
        offsets: product, axes or raster.
        reach: k of Eq. 9, in patches, for raster in places of the sequence.
        prefix_tokens: tokens without a position before the patches; every pair that touches one has
            the last id, size - 1 (papers.md#irpe-i10).

    Returns:
        ids, int64 (tables, T, T) with T = prefix + height * width, each table's from 0 on: one
        table, for axes two, rows then columns; and the size of one table.
    """
    size = clipped_size(offsets, reach, prefix_tokens)
    # A sequence is a grid of one row, with column ids.
    if offsets == "raster":
        if height < 1 or width < 1:
            raise ValueError(f"a grid of {height} x {width} has no patches")
        height, width = 1, height * width
    # iRPE's clip function reaches beta = 2 ratio.
    ids, _ = bucket_ids(_METHODS[offsets], height, width, reach / 2, "clip", prefix_tokens)
    if offsets == "product":
        return ids[None], size
    return (ids if offsets == "axes" else ids[1:]), size


def clipped_size(offsets: Offsets, reach: int, prefix_tokens: int = 0) -> int:
    """Return the rows of one table: 2 reach + 1, squared for product, and one for a prefix."""
    require_choice("offsets", offsets, get_args(Offsets))
    if reach < 1 or reach != int(reach):
        raise ValueError(f"the reach of clipped offsets must be a whole number from 1 on: {reach}")
    return table_size(_METHODS[offsets], reach / 2, prefix_tokens)


def longest_offset(offsets: Offsets, grid: tuple[int, int]) -> int:
    """Return the reach that clips nothing on a grid: its longer side or raster length; not 0."""
    return max((grid[0] * grid[1] if offsets == "raster" else max(grid)) - 1, 1)


class ClippedPosition(LookupPosition):
    """Base of encodings with one row per clipped offset: their options, and ids of all pairs.

    Args:
        name: for errors.
        grid: (rows, columns) where the context has no grid; also for `reach` None.
        offsets: one of the class's OFFSETS, see `clipped_ids`.
        reach: the longest offset that has a row of its own; None: the longest one of `grid`.
        shared_heads: one table for all heads.
        prefix_bucket: whether pairs with prefix tokens have a row (papers.md#irpe-i10).
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
        if offsets not in self.OFFSETS:
            choices = ", ".join(self.OFFSETS)
            raise ValueError(f"{name}: unknown offsets {offsets!r}; one of {choices}")
        if width % heads:
            raise ValueError(f"{name}: {heads} heads do not divide width {width}")
        if grid is not None and min(grid) < 1:
            raise ValueError(f"{name}: a grid of {grid[0]} x {grid[1]} has no patches")
        if reach is None:
            if grid is None:
                raise ValueError(f"{name} needs a reach, or a grid to take it from")
            reach = longest_offset(offsets, grid)
        self.name, self.offsets, self.reach = name, offsets, reach
        self.grid = None if grid is None else (grid[0], grid[1])
        self.head_width = width // heads
        # Offsets beyond the reach share the row of the furthest one, so a table serves every grid.
        self.table_heads = 1 if shared_heads else heads
        self.prefix_bucket = prefix_bucket
        try:
            self.size = clipped_size(offsets, reach, int(prefix_bucket))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def _table(self, channels: int) -> nn.Parameter:
        # Zeros leave a trained layer as it was.
        return nn.Parameter(torch.zeros(self.table_heads, self.size, channels))

    def _ids(
        self, context: PositionContext, queries: int, keys: int, device: torch.device
    ) -> Tensor:
        """Return ids of all pairs, (tables, T, T); tokens must be prefix and grid."""
        grid = require_grid_tokens(self.name, context, self.grid, queries, keys, self.prefix_bucket)
        return cached_ids(device, self.offsets, *grid, self.reach, context.prefix_tokens)


@cached_constant(maxsize=32)
def cached_ids(
    device: torch.device, offsets: Offsets, height: int, width: int, reach: int, prefix_tokens: int
) -> Tensor:
    """Return `clipped_ids` on a device, shared by all layers."""
    return clipped_ids(offsets, height, width, reach, prefix_tokens)[0].to(device)
