"""ARC grids as tokens of one template: colours, a border that says where the grid ends, padding.

ViTARC (Li et al. 2024) pads grids to the largest size and marks their ends by tokens of their own.
Its text on this is not in our excerpt. Here a template has one row and one column more than the
largest grid: cells just right of the grid are `RIGHT`, cells just below it `BELOW`, the one where
both meet is `CORNER`, and all further ones are `PADDING`. Raster order throughout.
"""

from __future__ import annotations

import numpy as np
from scipy import ndimage

from vlp.data.vision.arc.tasks import COLOURS, Grid

RIGHT, BELOW, CORNER, PADDING = range(COLOURS, COLOURS + 4)
TOKENS = COLOURS + 4


def to_tokens(grid: Grid, size: int) -> np.ndarray:
    """Return a grid in its template: ((size + 1) ** 2,) int64.

    Raises:
        ValueError: it has more than `size` rows or columns.
    """
    rows, columns = grid.shape
    if max(rows, columns) > size:
        raise ValueError(f"a grid of {rows} x {columns} is larger than {size} x {size}")
    template = np.full((size + 1, size + 1), PADDING)
    template[:rows, :columns] = grid
    template[:rows, columns] = RIGHT
    template[rows, :columns] = BELOW
    template[rows, columns] = CORNER
    return template.flatten()


def to_grid(tokens: np.ndarray, size: int) -> Grid | None:
    """Return a template's grid, the reverse of `to_tokens`; None where tokens make no grid.

    What stands beyond the border does not count.
    """
    template = np.asarray(tokens).reshape(size + 1, size + 1)
    corners = np.argwhere(template == CORNER)
    if len(corners) != 1 or not corners.all():
        return None
    rows, columns = corners[0].tolist()
    grid = template[:rows, :columns]
    whole = (
        (grid < COLOURS).all()
        and (template[:rows, columns] == RIGHT).all()
        and (template[rows, :columns] == BELOW).all()
    )
    return grid.copy() if whole else None


def object_boxes(grid: Grid) -> np.ndarray:
    """Boxes around the objects of a grid, for ViTARC's object encoding (papers.md#vitarc-v12).

    An object is a connected group of cells of one colour, diagonal neighbours included, of any
    colour but the most frequent one (the lowest of several). Boxes come colour by colour, each
    colour's in raster order of their first cells, so later colours paint over earlier ones.

    Returns:
        (objects, 4) float32: x, y, width, height in cells, x the column.
    """
    background = int(np.bincount(grid.flatten()).argmax())
    boxes = []
    for colour in np.unique(grid).tolist():
        if colour == background:
            continue
        groups, _ = ndimage.label(grid == colour, structure=np.ones((3, 3)))
        for rows, columns in ndimage.find_objects(groups):
            extent = columns.stop - columns.start, rows.stop - rows.start
            boxes.append((columns.start, rows.start, *extent))
    return np.array(boxes, dtype=np.float32).reshape(-1, 4)
