"""Resizing of the tables of a trained encoding for another grid.

Most tables know no grid and stay. CoPE, SaPE and clipped offsets repeat their last row beyond the
table, and learned absolute positions are resampled as a ViT's. Tables bound to a grid are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vlp.positions.base import PositionEncoding
from vlp.positions.clipped import ClippedPosition
from vlp.positions.coordinates import grid_size
from vlp.positions.cope import ContextualPosition
from vlp.positions.irpe import RelativePosition
from vlp.positions.learned import LearnedGridPosition, LearnedPosition
from vlp.positions.rotary import RotaryAxial, RotaryMixed
from vlp.positions.semantic import SemanticPosition
from vlp.positions.transformer_xl import TransformerXLPosition
from vlp.precision import at_least_float32

Grid = tuple[int, int]


def carry_over(
    name: str,
    encoding: PositionEncoding,
    trained: PositionEncoding,
    tables: Mapping[str, Tensor],
    grid: Grid,
    trained_grid: Grid,
) -> dict[str, Tensor]:
    """Return the tables of a trained encoding in the sizes of another.

    Args:
        name: of both, for messages.
        encoding: made for `grid`.
        trained: made for `trained_grid`; its own weights are not read.
        tables: the trained weights by their names in the encoding; may be empty.
        grid: (rows, columns) to be served; a sequence is one row.
        trained_grid: (rows, columns) of the training.
    """
    if grid == trained_grid:
        return dict(tables)
    text = (
        f"{name} was trained on a {grid_size(trained_grid)} grid and does not carry over to "
        f"{grid_size(grid)}"
    )
    if reason := _bound_reason(encoding, trained, grid, trained_grid):
        raise ValueError(f"{text}: {reason}")
    targets = dict(encoding.named_parameters())
    resized = {}
    for key, table in tables.items():
        if key in targets and key.startswith("table"):
            table = _on_other_grid(encoding, trained, table, targets[key], grid, trained_grid)
        if key in targets and table.shape != targets[key].shape:
            raise ValueError(
                f"{text}: {key} is {tuple(table.shape)} there and {tuple(targets[key].shape)} here"
            )
        resized[key] = table
    return resized


def _bound_reason(
    encoding: PositionEncoding, trained: Any, grid: Grid, trained_grid: Grid
) -> str | None:
    """Return why an encoding's weights do not serve another grid, or None."""
    # On a row, the rank of a distance is the distance, however long the row is.
    rows = max(grid[0], trained_grid[0])
    if isinstance(encoding, RelativePosition) and encoding.fixed_grid and rows > 1:
        return "it ranks the distances of its own grid (universe 'global' ranks those of all)"
    if isinstance(encoding, RotaryAxial | RotaryMixed) and encoding.spread != trained.spread:
        return "with `rescale`, its positions are those of the grid it is made for"
    # Only `product` numbers pairs of offsets by a multiple of the reach.
    by_reach = isinstance(encoding, TransformerXLPosition) and encoding.offsets == "product"
    if by_reach and rows > 1 and encoding.reach != trained.reach:
        return (
            f"its sinusoids go by the reach, {trained.reach} there and {encoding.reach} here "
            "(option `reach` keeps one)"
        )
    return None


def _on_other_grid(
    encoding: PositionEncoding,
    trained: Any,
    table: Tensor,
    target: Tensor,
    grid: Grid,
    trained_grid: Grid,
) -> Tensor:
    if isinstance(encoding, ClippedPosition):
        if encoding.prefix_bucket != trained.prefix_bucket:
            # Its shape does not fit, which the caller reports.
            return table
        return table[..., _clipped_rows(encoding, trained.reach), :]
    if isinstance(encoding, ContextualPosition | SemanticPosition):
        # Positions beyond the table share its last row (papers.md#sape-s11).
        return table[..., torch.arange(target.shape[-2]).clamp(max=table.shape[-2] - 1), :]
    if isinstance(encoding, LearnedGridPosition):
        # As one row: resampling a column of width 1 with antialias is wrong in PyTorch 2.15.
        return _resample(table[None], (1, len(target)))[0]
    if isinstance(encoding, LearnedPosition) and min(grid[0], trained_grid[0]) > 1:
        return _resample(table.unflatten(0, trained_grid), grid).flatten(0, 1)
    if isinstance(encoding, LearnedPosition):
        # A sequence may be shorter than its table.
        return table[: len(target)]
    return table


def _clipped_rows(encoding: ClippedPosition, reach: int) -> Tensor:
    # Offsets beyond a reach share the row of the furthest one; the last row is the prefix's.
    offsets = torch.arange(-encoding.reach, encoding.reach + 1).clamp(-reach, reach) + reach
    side = 2 * reach + 1
    if encoding.offsets == "product":
        offsets, side = (offsets[:, None] * side + offsets).flatten(), side * side
    return torch.cat([offsets, torch.full((int(encoding.prefix_bucket),), side)])


def _resample(table: Tensor, grid: Grid) -> Tensor:
    # Bicubic as timm does for a ViT.
    image = at_least_float32(table).permute(2, 0, 1)[None]
    out = functional.interpolate(
        image, size=grid, mode="bicubic", antialias=True, align_corners=False
    )
    return out[0].permute(1, 2, 0).to(table.dtype)
