"""ViTARC's object-based positional encoding, of a patch's object, column and row."""

from __future__ import annotations

import torch
from torch import Tensor

from vlp.positions.base import PositionContext, TokenEncoding
from vlp.positions.coordinates import patch_centres, require_grid, resolve_grid
from vlp.positions.sine import sinusoid
from vlp.precision import at_least_float32

# In cells: edges within this distance of a cell's border are on the border.
_TOLERANCE = 1e-3


def object_ids(boxes: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the object number of every patch, int64 (..., rows, columns) (papers.md#vitarc-v12).

    The object of row k has the number k + 1 on every cell that its box touches; where boxes
    overlap, the later row counts. The background is 0 (ViTARC section 4).

    Args:
        boxes: (..., K, 4) x, y, width, height in grid cells, x and y the upper left corner; rows of
            width or height 0 are padding.
        grid: (rows, columns).
    """
    rows, columns = grid
    if boxes.shape[-1] != 4 or boxes.ndim < 2:
        raise ValueError(f"object boxes are (..., K, 4), not {tuple(boxes.shape)}")
    x, y, width, height = at_least_float32(boxes).unbind(-1)
    right, bottom = x + width, y + height
    present = (width != 0) & (height != 0)
    # NaN is neither inside nor padding.
    inside = (
        (width > 0)
        & (height > 0)
        & (x >= -_TOLERANCE)
        & (y >= -_TOLERANCE)
        & (right <= columns + _TOLERANCE)
        & (bottom <= rows + _TOLERANCE)
    )
    invalid = present & ~inside
    if bool(invalid.any()):
        index = invalid.nonzero()[0].tolist()
        image = f" of image {', '.join(map(str, index[:-1]))}" if index[:-1] else ""
        box = ", ".join(f"{value:g}" for value in boxes[tuple(index)].tolist())
        raise ValueError(
            f"object box {index[-1]}{image} (x, y, width, height: {box}) does not lie inside the "
            f"{rows} x {columns} grid"
        )
    numbers = torch.arange(1, boxes.shape[-2] + 1, device=boxes.device) * present
    covered = _covers(y, bottom, rows).unsqueeze(-1) & _covers(x, right, columns).unsqueeze(-2)
    # The latest row has the highest number. The background is a layer, so that K may be 0.
    layers = numbers[..., None, None] * covered
    background = layers.new_zeros(*layers.shape[:-3], 1, rows, columns)
    return torch.cat([background, layers], -3).amax(-3)


class ObjectPosition(TokenEncoding):
    """`object`: concat(sinusoid(object), sinusoid(x), sinusoid(y)) (ViTARC Eq. 13).

    Half of the channels encode the object, a quarter the column x and a quarter the row y
    (papers.md#vitarc-v9, #vitarc-v11). Objects are numbered by `object_ids` from the context's
    boxes; without boxes it is the 2D sinusoid of Eq. 9 (papers.md#vitarc-v13). x and y count
    patches from 0. Any grid and any number of objects works. Prefix tokens get no position. Without
    `mixer` there are no parameters.

    Args:
        width: channels of the tokens; a multiple of 8.
        grid: (rows, columns) where the context has no grid.
        temperature: see `sinusoid`.
        layout: see `sinusoid`; of each of the three parts (papers.md#vitarc-v10).
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
        self.grid, self.temperature, self.layout = grid, temperature, layout

    def embeddings(self, x: Tensor, context: PositionContext) -> Tensor:
        """Return sinusoids of object, column and row: (B or 1, T - prefix, width)."""
        grid = resolve_grid(self.name, context, self.grid)
        require_grid(self.name, grid, x, context)
        dtype = torch.promote_types(x.dtype, torch.float32)
        coords = patch_centres(grid, dtype, x.device)[None] - 0.5
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
    """Return whether each cell of an axis lies between start and end (...): (..., cells) bool."""
    cell = torch.arange(cells, dtype=start.dtype, device=start.device)
    starts, ends = start.unsqueeze(-1) + _TOLERANCE, end.unsqueeze(-1) - _TOLERANCE
    return (cell + 1 > starts) & (cell < ends)
