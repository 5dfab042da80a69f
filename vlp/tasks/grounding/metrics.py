"""Metrics of grounding: IoU of boxes [x, y, width, height] in pixels, and scores of proposals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# A box with at least this IoU is right, as in RefCOCO.
RIGHT_IOU = 0.5


def intersection_over_union(
    boxes: NDArray[np.floating], box: Sequence[float]
) -> NDArray[np.float64]:
    """Compute the IoU of (n, 4) boxes with one box: (n,), 0 where neither has an area."""
    boxes = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    target = np.asarray(box, dtype=np.float64)
    start = np.maximum(boxes[:, :2], target[:2])
    end = np.minimum(boxes[:, :2] + boxes[:, 2:], target[:2] + target[2:])
    intersection = np.clip(end - start, 0, None).prod(axis=1)
    union = boxes[:, 2:].prod(axis=1) + target[2:].prod() - intersection
    return np.divide(intersection, union, out=np.zeros_like(intersection), where=union > 0)


def box_scores(
    heat: NDArray[np.floating], boxes: NDArray[np.floating], size: tuple[int, int]
) -> NDArray[np.float64]:
    """Compute ALBEF's score of each box (section 5, visual grounding): (n,).

    It is the sum of a heat map over the box's pixels, divided by the square root of the box's area;
    0 without an area.

    Args:
        heat: (rows, columns) of patches, at least 0; the pixels of a patch have its heat.
        boxes: (n, 4); parts outside the image add nothing.
        size: width and height of the image in pixels.
    """
    boxes = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    rows, columns = heat.shape
    widths = _overlap_lengths(boxes[:, 0], boxes[:, 2], columns, size[0])
    heights = _overlap_lengths(boxes[:, 1], boxes[:, 3], rows, size[1])
    sums = np.einsum("nr,rc,nc->n", heights, np.asarray(heat, dtype=np.float64), widths)
    # A sum alone would prefer the largest box, a mean the smallest.
    area = np.clip(boxes[:, 2:], 0, None).prod(axis=1)
    return np.divide(sums, np.sqrt(area), out=np.zeros_like(sums), where=area > 0)


def _overlap_lengths(
    start: NDArray[np.float64], length: NDArray[np.float64], patches: int, pixels: int
) -> NDArray[np.float64]:
    """Compute the overlap of each box with each patch along one axis, in pixels: (n, patches)."""
    edges = np.arange(patches + 1) * pixels / patches
    low = np.maximum(start[:, None], edges[:-1])
    high = np.minimum((start + length)[:, None], edges[1:])
    return np.clip(high - low, 0, None)
