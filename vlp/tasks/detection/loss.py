"""DETR's set prediction loss (Carion et al. 2020, Eq. 2) with Hungarian matching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional
from torchvision.ops import box_convert, generalized_box_iou, generalized_box_iou_loss

from vlp.objectives.loss import Loss

# Matching cost in place of a non-finite one: scipy refuses such costs, and the loss reports them.
MAX_COST = 1e6


def matching_cost(
    logits: Tensor,
    boxes: Tensor,
    labels: Tensor,
    object_boxes: Tensor,
    weights: tuple[float, float, float] = (1.0, 5.0, 2.0),
) -> Tensor:
    """Compute matching costs, w0 (-p(class)) + w1 L1 - w2 GIoU, without gradient.

    The result is (..., queries, objects).

    Args:
        logits: (..., queries, classes + 1).
        boxes: (..., queries, 4), centre x, y, width, height, as shares of the image.
        labels: (objects,) int64.
        object_boxes: (objects, 4), as `boxes`.
        weights: w0, w1 and w2.
    """
    with torch.no_grad():
        # Not the logarithm, so that the class term has the scale of the box terms (DETR, 3.1).
        probability = logits.softmax(-1)[..., labels]
        distance = torch.cdist(boxes, object_boxes.expand(*boxes.shape[:-2], -1, -1), p=1)
        corners = box_convert(boxes.flatten(0, -2), "cxcywh", "xyxy")
        giou = generalized_box_iou(corners, box_convert(object_boxes, "cxcywh", "xyxy"))
        w_class, w_distance, w_giou = weights
        return w_distance * distance - w_class * probability - w_giou * giou.view_as(distance)


def match(costs: Sequence[Tensor]) -> list[NDArray[np.int64]]:
    """Find the assignment of least total cost for every cost matrix (queries, objects).

    Each result (objects,) has the query of each object; the queries are different.
    """
    assignments = []
    for cost in costs:
        queries, objects = cost.shape
        if objects > queries:
            raise ValueError(f"{objects} objects are more than {queries} queries")
        finite = torch.nan_to_num(cost, MAX_COST, MAX_COST, -MAX_COST).double().cpu().numpy()
        query_index, object_index = linear_sum_assignment(finite)
        assignment = np.empty(objects, dtype=np.int64)
        assignment[object_index] = query_index
        assignments.append(assignment)
    return assignments


# Weight of a matched query in the class term; 'no object' has a part of it. Weights are integers,
# as the count of a `Loss` is an integer.
_MATCHED_WEIGHT = 1000


class SetLosses(NamedTuple):
    """Losses of one decoder layer, and numbers of its matched queries."""

    classes: Loss
    l1: Loss
    giou: Loss
    # Number of matched queries with the right class, 0-d.
    num_correct: Tensor
    # Number of matched queries, 0-d.
    num_matched: Tensor


def set_losses(
    logits: Tensor,
    boxes: Tensor,
    labels: Sequence[Tensor],
    object_boxes: Sequence[Tensor],
    matching_weights: tuple[float, float, float] = (1.0, 5.0, 2.0),
    no_object: float = 0.1,
) -> list[SetLosses]:
    """Match the queries of each decoder layer with the objects and compute its losses.

    The class term is a cross-entropy over all queries, normalised by the sum of their weights; box
    terms are sums over matched queries, normalised by the number of objects.

    Args:
        logits: (layers, B, queries, classes + 1), the last class is 'no object'.
        boxes: (layers, B, queries, 4), centre x, y, width, height as shares of the image.
        labels: B tensors (objects,) int64.
        object_boxes: B tensors (objects, 4), as `boxes`.
        matching_weights: of class, L1 and GIoU, as in `matching_cost`.
        no_object: weight of queries without object, a multiple of 0.001.
    """
    no_object_weight = round(no_object * _MATCHED_WEIGHT)
    if abs(no_object_weight - no_object * _MATCHED_WEIGHT) > 1e-6:
        raise ValueError(f"no_object {no_object} must be a multiple of {1 / _MATCHED_WEIGHT}")
    layers, images, queries, classes = logits.shape
    # One transfer to the host per image; the matrices are in the order image, then layer.
    costs = [
        layer_cost
        for image in range(images)
        for layer_cost in matching_cost(
            logits[:, image], boxes[:, image], labels[image], object_boxes[image], matching_weights
        ).cpu()
    ]
    assignments = [torch.from_numpy(assignment) for assignment in match(costs)]
    target_labels = torch.cat(list(labels)) if images else logits.new_zeros(0).long()
    target_boxes = torch.cat(list(object_boxes)) if images else boxes.new_zeros(0, 4)
    image_index = torch.arange(images).repeat_interleave(
        torch.tensor([len(image_labels) for image_labels in labels], dtype=torch.int64)
    )
    losses = []
    for layer in range(layers):
        layer_assignments = assignments[layer::layers]
        # `image_index` is empty if there is no image.
        query_index = torch.cat(layer_assignments or [image_index])
        index = image_index.to(logits.device), query_index.to(logits.device)
        query_labels = torch.full((images, queries), classes - 1, device=logits.device)
        query_labels[index] = target_labels
        query_weights = torch.full((images, queries), no_object_weight, device=logits.device)
        query_weights[index] = _MATCHED_WEIGHT
        nats = functional.cross_entropy(
            logits[layer].flatten(0, 1), query_labels.flatten(), reduction="none"
        )
        matched_boxes = boxes[layer][index]
        matched_xyxy = box_convert(matched_boxes, "cxcywh", "xyxy")
        target_xyxy = box_convert(target_boxes, "cxcywh", "xyxy")
        count = torch.tensor(len(target_labels), device=logits.device)
        losses.append(
            SetLosses(
                Loss((nats * query_weights.flatten()).sum(), query_weights.sum()),
                Loss((matched_boxes - target_boxes).abs().sum(), count),
                Loss(generalized_box_iou_loss(matched_xyxy, target_xyxy, reduction="sum"), count),
                (logits[layer][index].detach()[:, :-1].argmax(-1) == target_labels).sum(),
                count,
            )
        )
    return losses
