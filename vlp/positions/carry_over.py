"""Resizing of the tables of a trained encoding for another grid.

Most tables do not depend on a grid. Those of CoPE, SaPE and clipped offsets are cut, or extended by
their last row; learned absolute positions are resampled. Tables bound to their grid are refused.
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
    """Return the tables of a trained encoding, resized for another grid.

    Args:
        trained: the encoding for `trained_grid`; its weights are not read.
        tables: trained weights by their names in the encoding; may be empty.
        grid: (rows, columns) of the new grid; a sequence is one row.
        trained_grid: (rows, columns) in training.
    """
    if grid == trained_grid:
        return dict(tables)
    message = (
        f"{name} was trained on a {grid_size(trained_grid)} grid and does not carry over to "
        f"{grid_size(grid)}"
    )
    if reason := _refusal_reason(encoding, trained, grid, trained_grid):
        raise ValueError(f"{message}: {reason}")
    targets = dict(encoding.named_parameters())
    resized = {}
    for key, table in tables.items():
        if key in targets and key.startswith("table"):
            table = _resize(encoding, trained, table, targets[key], grid, trained_grid)
        if key in targets and table.shape != targets[key].shape:
            shape, target_shape = tuple(table.shape), tuple(targets[key].shape)
            raise ValueError(f"{message}: {key} is {shape} there and {target_shape} here")
        resized[key] = table
    return resized


def _refusal_reason(
    encoding: PositionEncoding, trained: Any, grid: Grid, trained_grid: Grid
) -> str | None:
    """Return why an encoding's weights do not fit another grid; None if they fit."""
    # On grids of one row, rank and distance are equal, whatever the length.
    rows = max(grid[0], trained_grid[0])
    if isinstance(encoding, RelativePosition) and encoding.ranks_on_grid and rows > 1:
        return "it ranks the distances of its own grid (universe 'global' ranks those of all)"
    if isinstance(encoding, RotaryAxial | RotaryMixed) and encoding.ref_grid != trained.ref_grid:
        return "with `rescale`, it counts in patches of the trained grid"
    # `product` takes sinusoids of dy * (2 reach + 1) + dx.
    is_product = isinstance(encoding, TransformerXLPosition) and encoding.offsets == "product"
    if is_product and rows > 1 and encoding.reach != trained.reach:
        return (
            f"its sinusoids depend on the option reach, {trained.reach} there and {encoding.reach} "
            f"here: set it to {trained.reach}"
        )
    return None


def _resize(
    encoding: PositionEncoding,
    trained: Any,
    table: Tensor,
    target: Tensor,
    grid: Grid,
    trained_grid: Grid,
) -> Tensor:
    """Return a trained table resized for `grid`; the caller checks the shape of the result."""
    if isinstance(encoding, ClippedPosition):
        if encoding.prefix_bucket != trained.prefix_bucket:
            # The caller reports the shape, which does not fit.
            return table
        return table[..., _clipped_rows(encoding, trained.reach), :]
    if isinstance(encoding, ContextualPosition | SemanticPosition):
        # Positions beyond the table share its last row (papers.md#sape-s11).
        return table[..., torch.arange(target.shape[-2]).clamp(max=table.shape[-2] - 1), :]
    if isinstance(encoding, LearnedGridPosition):
        # As one row: PyTorch 2.15 resamples a grid of width 1 wrongly with antialias.
        return _resample(table[None], (1, len(target)))[0]
    if isinstance(encoding, LearnedPosition) and min(grid[0], trained_grid[0]) > 1:
        return _resample(table.unflatten(0, trained_grid), grid).flatten(0, 1)
    if isinstance(encoding, LearnedPosition):
        # A sequence may be shorter than its table, but not longer: the caller reports that.
        return table[: len(target)]
    return table


def _clipped_rows(encoding: ClippedPosition, trained_reach: int) -> Tensor:
    """Return for each row of the encoding's table the row of a trained table of another reach."""
    # Offsets beyond the trained reach have the row of the furthest offset; the last row is for the
    # prefix.
    offsets = torch.arange(-encoding.reach, encoding.reach + 1)
    rows = offsets.clamp(-trained_reach, trained_reach) + trained_reach
    size = 2 * trained_reach + 1
    if encoding.offsets == "product":
        rows, size = (rows[:, None] * size + rows).flatten(), size * size
    return torch.cat([rows, torch.full((int(encoding.prefix_bucket),), size)])


def _resample(table: Tensor, grid: Grid) -> Tensor:
    """Resample a table (rows, columns, width) to another grid as timm resamples a ViT's."""
    image = at_least_float32(table).permute(2, 0, 1)[None]
    out = functional.interpolate(
        image, size=grid, mode="bicubic", antialias=True, align_corners=False
    )
    return out[0].permute(1, 2, 0).to(table.dtype)
