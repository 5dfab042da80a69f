"""Metrics of grounding: overlap of boxes [x, y, width, height] in pixels, and ranks of boxes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# RefCOCO's: a box with at least this overlap is right.
RIGHT_IOU = 0.5


def intersection_over_union(
    boxes: NDArray[np.floating], other: Sequence[float]
) -> NDArray[np.float64]:
    """Compute the overlap (n,) of (n, 4) boxes with one; 0 where both have no area."""
    boxes = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    target = np.asarray(other, dtype=np.float64)
    start = np.maximum(boxes[:, :2], target[:2])
    end = np.minimum(boxes[:, :2] + boxes[:, 2:], target[:2] + target[2:])
    shared = np.clip(end - start, 0, None).prod(axis=1)
    union = boxes[:, 2:].prod(axis=1) + target[2:].prod() - shared
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def box_scores(
    heat: NDArray[np.floating], boxes: NDArray[np.floating], size: tuple[int, int]
) -> NDArray[np.float64]:
    """Compute the sum of a map in each box, over the square root of the box's area: (n,).

    ALBEF's score of a proposal (section 5, visual grounding). The map is constant in each patch; a
    box without area gets 0.

    Args:
        heat: (rows, columns), at least 0.
        boxes: (n, 4); parts outside the image add nothing.
    """
    boxes = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    rows, columns = heat.shape
    across = _covered(boxes[:, 0], boxes[:, 2], columns, size[0])
    down = _covered(boxes[:, 1], boxes[:, 3], rows, size[1])
    sums = np.einsum("nr,rc,nc->n", down, np.asarray(heat, dtype=np.float64), across)
    # A sum alone would prefer the largest box, a mean the smallest.
    area = np.clip(boxes[:, 2:], 0, None).prod(axis=1)
    return np.divide(sums, np.sqrt(area), out=np.zeros_like(sums), where=area > 0)


def _covered(
    start: NDArray[np.float64], length: NDArray[np.float64], patches: int, pixels: int
) -> NDArray[np.float64]:
    """Compute pixels of each patch, along one axis, that each box covers: (boxes, patches)."""
    edges = np.arange(patches + 1) * pixels / patches
    low = np.maximum(start[:, None], edges[:-1])
    high = np.minimum((start + length)[:, None], edges[1:])
    return np.clip(high - low, 0, None)
