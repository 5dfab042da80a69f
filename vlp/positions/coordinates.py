"""Coordinates of tokens, from a grid of patches or from the context."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vlp.positions.base import PositionContext

# Tolerance of shares of the image in [0, 1]: half precision, and x + width in float32, round.
_TOLERANCE = 1e-3


def patch_centres(grid: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return x, y of the patches' centres in raster order: (rows * columns, 2).

    They count patches from the image's upper left corner: the first is 0.5, 0.5.
    """
    rows, columns = grid
    y = torch.arange(rows, dtype=dtype, device=device) + 0.5
    x = torch.arange(columns, dtype=dtype, device=device) + 0.5
    return torch.stack([x.expand(rows, -1), y[:, None].expand(-1, columns)], -1).flatten(0, 1)


def patch_boxes(grid: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return x0, y0, x1, y1 of the patches in raster order: (rows * columns, 4), in patches."""
    centres = patch_centres(grid, dtype, device)
    return torch.cat([centres - 0.5, centres + 0.5], -1)


def vertical_first(coordinates: Tensor) -> Tensor:
    """Reorder x, y to y, x and x0, y0, x1, y1 to y0, x0, y1, x1 along the last axis (Li et al.)."""
    return coordinates.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def sequence_length(name: str, x: Tensor, context: PositionContext) -> int:
    """Return the number of tokens of x (B, T, width) after the prefix."""
    if context.grid is not None:
        require_grid(name, context.grid, x, context)
    length = x.shape[-2] - context.prefix_tokens
    if length < 0:
        raise ValueError(
            f"{name}: {context.prefix_tokens} prefix tokens are more than the {x.shape[-2]} tokens"
        )
    return length


def require_patches(name: str, grid: tuple[int, int]) -> None:
    """Raise ValueError for a grid (rows, columns) without patches."""
    if min(grid) < 1:
        raise ValueError(f"{name}: a grid of {grid_size(grid)} has no patches")


def require_grid(name: str, grid: tuple[int, int], x: Tensor, context: PositionContext) -> None:
    """Raise ValueError unless the tokens of x (B, T, width) are the prefix and this grid."""
    require_patches(name, grid)
    tokens = context.prefix_tokens + grid[0] * grid[1]
    if x.shape[-2] != tokens:
        raise ValueError(
            f"{name}: {context.prefix_tokens} prefix tokens and a {grid_size(grid)} grid "
            f"are {tokens} tokens, not {x.shape[-2]}"
        )


def require_extent(name: str, extent: float | None) -> None:
    """Raise ValueError unless an extent is positive."""
    if extent is not None and not 0 < extent < math.inf:
        raise ValueError(f"{name}: the extent must be positive, not {extent}")


def token_coordinates(
    name: str,
    dimensions: int,
    x: Tensor,
    context: PositionContext,
    grid: tuple[int, int] | None = None,
    extent: float | None = None,
) -> Tensor:
    """Return coordinates of the tokens after the prefix: x, y, or boxes x0, y0, x1, y1.

    They are the context's coordinates, or else of the patches of its grid, or else of `grid`.
    Without `extent` their unit is a patch (of each image's grid if the context has `grids`); with
    it they range from 0 to `extent` over the image. Points in patches start at the centre of the
    first patch: patch (row, column) is at x = column, y = row. Boxes, and points with `extent`,
    start at the image's corner.

    Args:
        dimensions: 2 for points, 4 for boxes.
        x: (B, T, width); only its shape, device and dtype are read.
        grid: (rows, columns) where the context has no grid.
        extent: width and height of the image in the result's unit; None counts patches.

    Returns:
        (B or 1, T - prefix, dimensions) in the dtype of x, float32 for half precision.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    grid = context.grid or grid
    if context.coordinates is None:
        if grid is None:
            raise ValueError(
                f"{name} needs a grid, in its options or in the context, or coordinates"
            )
        require_grid(name, grid, x, context)
        patch_coordinates = patch_boxes if dimensions == 4 else patch_centres
        coordinates = patch_coordinates(grid, dtype, x.device)[None]
        if extent is not None:
            rows, columns = grid
            factors = coordinates.new_tensor([extent / columns, extent / rows])
            return coordinates * factors.repeat(dimensions // 2)
    else:
        _require_coordinates(name, dimensions, x, context, context.coordinates)
        coordinates = context.coordinates.to(x.device, dtype)
        if extent is not None:
            return coordinates * extent
        unit = patches_per_side(coordinates, context.grids, grid)
        if unit is None:
            raise ValueError(
                f"{name} counts in patches: for coordinates it needs a grid, in its options or "
                "in the context, or the option extent"
            )
        coordinates = coordinates * unit.repeat(1, 1, dimensions // 2)
    return coordinates if dimensions == 4 else coordinates - 0.5


def patches_per_side(
    shares: Tensor, grids: Tensor | None, grid: tuple[int, int] | None
) -> Tensor | None:
    """Return columns and rows of `grids`, or else of `grid`: (B or 1, 1, 2), or None.

    shares: coordinates, of which only dtype and device are read.
    """
    if grids is not None:
        return grids.to(shares).flip(-1)[:, None]
    return None if grid is None else shares.new_tensor([[[grid[1], grid[0]]]])


def _require_coordinates(
    name: str, dimensions: int, x: Tensor, context: PositionContext, coordinates: Tensor
) -> None:
    expected = (x.shape[-2] - context.prefix_tokens, dimensions)
    batch = (1, x.shape[0])
    shape = tuple(coordinates.shape)
    if len(shape) != 3 or shape[0] not in batch or shape[1:] != expected:
        raise ValueError(
            f"{name} needs coordinates ({x.shape[0]} or 1, {expected[0]}, {expected[1]}) for "
            f"{x.shape[-2]} tokens of which {context.prefix_tokens} are prefix, not {shape}"
        )
    # Negated, so that NaN raises, too.
    if not bool(((coordinates >= -_TOLERANCE) & (coordinates <= 1 + _TOLERANCE)).all()):
        low, high = coordinates.min().item(), coordinates.max().item()
        raise ValueError(
            f"{name}: coordinates are shares of the image in [0, 1], not {low:g} to {high:g}"
        )


def grid_size(grid: tuple[int, int]) -> str:
    """Return a grid as "ROWS x COLUMNS"."""
    return f"{grid[0]} x {grid[1]}"


def resolve_grid(
    name: str, context: PositionContext, grid: tuple[int, int] | None
) -> tuple[int, int]:
    """Return the context's grid, or else `grid`, as (rows, columns)."""
    if context.grid is not None:
        return context.grid
    if context.coordinates is not None:
        raise ValueError(
            f"{name} needs a grid, but these tokens have coordinates, as in a batch of padded "
            "images or of different grids: batch images of one grid, unpadded"
        )
    if grid is None:
        raise ValueError(f"{name} needs a grid, in its options or in the context")
    return grid


def resolve_length(name: str, length: int | None, grid: tuple[int, int] | None) -> int:
    """Return `length`, or else the number of patches of `grid`; both must agree."""
    patches = None if grid is None else grid[0] * grid[1]
    length = patches if length is None else length
    if length is None or length < 1 or (patches is not None and patches != length):
        raise ValueError(
            f"{name} needs a positive length or a grid, not length {length} and grid {grid}"
        )
    return length


def require_grid_tokens(
    name: str,
    context: PositionContext,
    grid: tuple[int, int] | None,
    queries: int,
    keys: int,
    prefix_bucket: bool = True,
) -> tuple[int, int]:
    """Return the grid (rows, columns) of self-attention over the prefix and a whole grid.

    grid: where the context has none. queries, keys: numbers of tokens. prefix_bucket: whether the
    encoding has a row for prefix tokens.
    """
    rows, columns = resolve_grid(name, context, grid)
    prefix = context.prefix_tokens
    if prefix and not prefix_bucket:
        raise ValueError(f"{name}: {prefix} prefix tokens, but prefix_bucket is False")
    tokens = prefix + rows * columns
    if (queries, keys) != (tokens, tokens):
        raise ValueError(
            f"{name}: {prefix} prefix tokens and a {rows} x {columns} grid are {tokens} tokens "
            f"that attend to themselves, not {queries} queries and {keys} keys"
        )
    return rows, columns
