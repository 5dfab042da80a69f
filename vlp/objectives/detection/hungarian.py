"""Hungarian matching of queries and objects, as in DETR (Carion et al. 2020, Eq. 1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torchvision.ops import box_convert, generalized_box_iou

IMPOSSIBLE = 1e6
"""Cost of what is not finite: the loss of that image says so itself, the matching must not end
the run."""


def matching_cost(
    logits: Tensor,
    boxes: Tensor,
    labels: Tensor,
    objects: Tensor,
    weights: tuple[float, float, float] = (1.0, 5.0, 2.0),
) -> Tensor:
    """Compute the cost of each object for each query: - w0 p(class) + w1 L1 - w2 GIoU.

    The class counts as a probability, not as its logarithm, so that it weighs as much as the boxes.

    Args:
        logits: (..., queries, classes + 1).
        boxes: (..., queries, 4), centre x, y, width, height, as shares of the image.
        labels: (objects,) int64.
        objects: (objects, 4), like boxes.
        weights: of class, L1 and GIoU.

    Returns:
        (..., queries, objects), without gradient.
    """
    with torch.no_grad():
        probability = logits.softmax(-1)[..., labels]
        distance = torch.cdist(boxes, objects.expand(*boxes.shape[:-2], -1, -1), p=1)
        corners = box_convert(boxes.flatten(0, -2), "cxcywh", "xyxy")
        overlap = generalized_box_iou(corners, box_convert(objects, "cxcywh", "xyxy"))
        on_class, on_distance, on_overlap = weights
        overlap = overlap.view_as(distance)
        return on_distance * distance - on_class * probability - on_overlap * overlap


def match(costs: Sequence[Tensor]) -> list[NDArray[np.int64]]:
    """Find the assignment of least total cost for every cost matrix (queries, objects).

    Returns:
        For each matrix the queries of objects 0, 1, ...: (objects,), all different.

    Raises:
        ValueError: there are more objects than queries.
    """
    assigned = []
    for cost in costs:
        queries, objects = cost.shape
        if objects > queries:
            raise ValueError(f"{objects} objects are more than {queries} queries")
        finite = torch.nan_to_num(cost, IMPOSSIBLE, IMPOSSIBLE, -IMPOSSIBLE).double().cpu().numpy()
        query, number = linear_sum_assignment(finite)
        chosen = np.empty(objects, dtype=np.int64)
        chosen[number] = query
        assigned.append(chosen)
    return assigned
