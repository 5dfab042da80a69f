"""Patches of an image that lie in a box."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def patches_in_box(
    box: Sequence[float], grid: tuple[int, int], size: tuple[int, int]
) -> NDArray[np.bool_]:
    """Return patches whose centre lies in the box; for a tiny box, the patch it is on.

    Args:
        box: [x, y, width, height] in pixels of the image.
        grid: patches (rows, columns). The image is squashed to the model's square, so patches
            of an image that is not square are not square either.
        size: the image's (width, height) in pixels.

    Returns:
        (rows * columns,) in raster order.
    """
    rows, columns = grid
    x, y, width, height = box
    across = (np.arange(columns) + 0.5) * size[0] / columns
    down = (np.arange(rows) + 0.5) * size[1] / rows
    inside = np.logical_and.outer(
        (down >= y) & (down < y + height), (across >= x) & (across < x + width)
    )
    if not inside.any():
        row = int(np.clip((y + height / 2) * rows / size[1], 0, rows - 1))
        column = int(np.clip((x + width / 2) * columns / size[0], 0, columns - 1))
        inside[row, column] = True
    return inside.ravel()
