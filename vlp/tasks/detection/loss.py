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

# Cost in place of a number that is not finite: the loss reports it, the matching goes on.
IMPOSSIBLE = 1e6


def matching_cost(
    logits: Tensor,
    boxes: Tensor,
    labels: Tensor,
    objects: Tensor,
    weights: tuple[float, float, float] = (1.0, 5.0, 2.0),
) -> Tensor:
    """Compute the cost of each object for each query: - w0 p(class) + w1 L1 - w2 GIoU.

    Args:
        logits: (..., queries, classes + 1).
        boxes: (..., queries, 4), centre x, y, width, height, as shares of the image.
        labels: (objects,) int64.
        objects: (objects, 4), like boxes.

    Returns:
        (..., queries, objects), without gradient.
    """
    with torch.no_grad():
        # No logarithm as in the loss, so that the class weighs as much as the boxes.
        probability = logits.softmax(-1)[..., labels]
        distance = torch.cdist(boxes, objects.expand(*boxes.shape[:-2], -1, -1), p=1)
        corners = box_convert(boxes.flatten(0, -2), "cxcywh", "xyxy")
        overlap = generalized_box_iou(corners, box_convert(objects, "cxcywh", "xyxy"))
        on_class, on_distance, on_overlap = weights
        overlap = overlap.view_as(distance)
        return on_distance * distance - on_class * probability - on_overlap * overlap


def match(costs: Sequence[Tensor]) -> list[NDArray[np.int64]]:
    """Find the assignment of least total cost for every cost matrix (queries, objects).

    Each result (objects,) holds the queries, all different, of objects 0, 1, ....
    """
    assignments = []
    for cost in costs:
        queries, objects = cost.shape
        if objects > queries:
            raise ValueError(f"{objects} objects are more than {queries} queries")
        finite = torch.nan_to_num(cost, IMPOSSIBLE, IMPOSSIBLE, -IMPOSSIBLE).double().cpu().numpy()
        query, number = linear_sum_assignment(finite)
        assignment = np.empty(objects, dtype=np.int64)
        assignment[number] = query
        assignments.append(assignment)
    return assignments


# A `Loss` has an integer count, so the weight of 'no object' counts in thousandths.
_PARTS = 1000


class SetLosses(NamedTuple):
    """Sums of one decoder layer: class, L1 and GIoU, and how well matched queries do."""

    classes: Loss
    l1: Loss
    giou: Loss
    # Matched queries with the right class, and all matched ones, both scalars.
    right: Tensor
    matched: Tensor


def set_losses(
    logits: Tensor,
    boxes: Tensor,
    labels: Sequence[Tensor],
    objects: Sequence[Tensor],
    cost: tuple[float, float, float] = (1.0, 5.0, 2.0),
    no_object: float = 0.1,
) -> list[SetLosses]:
    """Match each decoder layer with the objects and compute its losses.

    The class term is a cross-entropy over all queries, normalised by the sum of their weights; box
    terms are normalised by the number of objects.

    Args:
        logits: (layers, B, queries, classes + 1), the last class is 'no object'.
        boxes: (layers, B, queries, 4), centre x, y, width, height as shares of the image.
        labels: of each image, (objects,) int64.
        objects: of each image, (objects, 4), like boxes.
        cost: weights of class, L1 and GIoU in the matching.
        no_object: weight of queries without object, in thousandths at the finest.
    """
    share = round(no_object * _PARTS)
    if abs(share - no_object * _PARTS) > 1e-6:
        raise ValueError(f"no_object {no_object} is no whole number of thousandths")
    layers, images, queries, classes = logits.shape
    # One transfer to the host an image for all layers: (image, layer) after (image, layer).
    costs = [
        cost_matrix
        for number in range(images)
        for cost_matrix in matching_cost(
            logits[:, number], boxes[:, number], labels[number], objects[number], cost
        ).cpu()
    ]
    assignments = [torch.from_numpy(assignment) for assignment in match(costs)]
    label = torch.cat(list(labels)) if images else logits.new_zeros(0).long()
    target = torch.cat(list(objects)) if images else boxes.new_zeros(0, 4)
    image = torch.arange(images).repeat_interleave(
        torch.tensor([len(image_labels) for image_labels in labels], dtype=torch.int64)
    )
    out = []
    for layer in range(layers):
        query = torch.cat([assignments[n * layers + layer] for n in range(images)] or [image])
        index = image.to(logits.device), query.to(logits.device)
        target_classes = torch.full((images, queries), classes - 1, device=logits.device)
        target_classes[index] = label
        weight = torch.full((images, queries), share, device=logits.device)
        weight[index] = _PARTS
        errors = functional.cross_entropy(
            logits[layer].flatten(0, 1), target_classes.flatten(), reduction="none"
        )
        predicted = boxes[layer][index]
        count = torch.tensor(len(label), device=logits.device)
        out.append(
            SetLosses(
                Loss((errors * weight.flatten()).sum(), weight.sum()),
                Loss((predicted - target).abs().sum(), count),
                Loss(_giou_loss(predicted, target), count),
                (logits[layer][index].detach()[:, :-1].argmax(-1) == label).sum(),
                count,
            )
        )
    return out


def _giou_loss(predicted: Tensor, target: Tensor) -> Tensor:
    boxes, targets = (box_convert(part, "cxcywh", "xyxy") for part in (predicted, target))
    loss: Tensor = generalized_box_iou_loss(boxes, targets, reduction="sum")
    return loss
