"""ViTARC's object-based positional encoding, of a patch's object, column and row."""

from __future__ import annotations

import torch
from torch import Tensor

from vlp.positions.base import PositionContext, TokenEncoding
from vlp.positions.coordinates import patch_centres, require_grid, resolve_grid
from vlp.positions.sine import sinusoid
from vlp.precision import at_least_float32

# In cells: an edge that misses a cell's border by a rounding error is on the border.
_TOLERANCE = 1e-3


def object_ids(boxes: Tensor, grid: tuple[int, int]) -> Tensor:
    """Paint the object of every patch from boxes (ViTARC section 4, papers.md#vitarc-v12).

    Row k paints the number k + 1 on every cell that its box touches; later rows paint over earlier
    ones, and 0 is the background.

    Args:
        boxes: (..., K, 4) x, y, width, height in grid cells, x and y the upper left corner; rows of
            width or height 0 are padding.
        grid: (rows, columns).

    Returns:
        int64 (..., rows, columns), from 0 to K.
    """
    rows, columns = grid
    if boxes.shape[-1] != 4 or boxes.ndim < 2:
        raise ValueError(f"object boxes are (..., K, 4), not {tuple(boxes.shape)}")
    x, y, width, height = at_least_float32(boxes).unbind(-1)
    right, bottom = x + width, y + height
    present = (width != 0) & (height != 0)
    inside = (
        (width > 0)
        & (height > 0)
        & (x >= -_TOLERANCE)
        & (y >= -_TOLERANCE)
        & (right <= columns + _TOLERANCE)
        & (bottom <= rows + _TOLERANCE)
    )
    # NaN is neither inside nor padding.
    invalid = present & ~inside
    if bool(invalid.any()):
        index = invalid.nonzero()[0].tolist()
        box = ", ".join(f"{value:g}" for value in boxes[tuple(index)].tolist())
        raise ValueError(
            f"object box {index[-1]}{_image(index)} (x, y, width, height: {box}) does not lie "
            f"inside the {rows} x {columns} grid"
        )
    numbers = torch.arange(1, boxes.shape[-2] + 1, device=boxes.device) * present
    covered = _covers(y, bottom, rows).unsqueeze(-1) & _covers(x, right, columns).unsqueeze(-2)
    # The last painter has the highest number; the background joins so that K may be 0.
    painted = numbers[..., None, None] * covered
    background = painted.new_zeros(*painted.shape[:-3], 1, rows, columns)
    return torch.cat([background, painted], -3).amax(-3)


class ObjectPosition(TokenEncoding):
    """`object`: concat(sinusoid(object), sinusoid(x), sinusoid(y)) (ViTARC Eq. 13).

    Half of the channels encode the object, a quarter each x, the column, and y, the row, in that
    order (papers.md#vitarc-v9, #vitarc-v11). Objects are numbered by `object_ids` from the
    context's boxes; without boxes there is the plain 2D sinusoid of Eq. 9 (papers.md#vitarc-v13).
    x and y count patches from 0. Every grid and any number of objects works. Prefix tokens get no
    position. There are no parameters without `mixer`, which lets a model turn the objects down.

    Args:
        width: channels of the tokens; a multiple of 8.
        grid: (rows, columns) where the context has no grid.
        temperature: see `sinusoid`.
        layout: see `sinusoid`; within each part (papers.md#vitarc-v10).
        mixer: see `TokenEncoding`.
    """

    def __init__(
        self,
        width: int,
        grid: tuple[int, int] | None = None,
        temperature: float = 10_000.0,
        layout: str = "halves",
        mixer: bool = False,
    ) -> None:
        super().__init__("object", width, mixer)
        if width % 8:
            raise ValueError(f"object: width {width} is not a multiple of 8")
        # Raises for impossible options.
        sinusoid(torch.zeros(1), width // 4, temperature, layout)
        self.grid = None if grid is None else (grid[0], grid[1])
        self.temperature, self.layout = temperature, layout

    def embeddings(self, x: Tensor, context: PositionContext) -> Tensor:
        """Return sinusoids of object, column and row: (B or 1, T - prefix, width)."""
        grid = resolve_grid(self.name, context, self.grid)
        require_grid(self.name, grid, x, context)
        dtype = torch.promote_types(x.dtype, torch.float32)
        coords = patch_centres(grid, dtype, x.device)[None] - 0.5
        # Half of the channels for x and half for y, as for a decoder's output without objects.
        if context.boxes is None:
            return self._sinusoid(coords, self.width // 2).flatten(-2)
        if context.boxes.ndim != 3:
            raise ValueError(f"object boxes are (batch, K, 4), not {tuple(context.boxes.shape)}")
        ids = object_ids(context.boxes.to(x.device), grid).flatten(-2).to(dtype)
        objects = self._sinusoid(ids, self.width // 2)
        patches = self._sinusoid(coords, self.width // 4).flatten(-2)
        return torch.cat([objects, patches.expand(len(ids), -1, -1)], -1)

    def _sinusoid(self, positions: Tensor, channels: int) -> Tensor:
        return sinusoid(positions, channels, self.temperature, self.layout)


def _covers(start: Tensor, end: Tensor, cells: int) -> Tensor:
    # Cells of one axis that lie between start and end (...): (..., cells).
    cell = torch.arange(cells, dtype=start.dtype, device=start.device)
    starts, ends = start.unsqueeze(-1) + _TOLERANCE, end.unsqueeze(-1) - _TOLERANCE
    return (cell + 1 > starts) & (cell < ends)


def _image(index: list[int]) -> str:
    return f" of image {', '.join(map(str, index[:-1]))}" if len(index) > 1 else ""
