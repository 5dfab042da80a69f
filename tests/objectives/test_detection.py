import itertools
import math

import numpy as np
import pytest
import torch
from boxes_by_hand import random_boxes, slow_giou
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp.tasks.detection.loss import match, matching_cost, set_losses


def test_the_cost_is_that_of_the_paper():
    logits, boxes = torch.randn(2, 4, 6).double(), random_boxes(2, 4)
    labels, objects = torch.tensor([3, 0, 3]), random_boxes(3)
    cost = matching_cost(logits, boxes, labels, objects, (1.5, 4.0, 3.0))
    assert cost.shape == (2, 4, 3)
    for layer, query, number in itertools.product(range(2), range(4), range(3)):
        odds = [math.exp(value) for value in logits[layer, query].tolist()]
        one, other = boxes[layer, query], objects[number]
        expected = (
            -1.5 * odds[labels[number]] / sum(odds)
            + 4.0 * sum(abs(a - b) for a, b in zip(one.tolist(), other.tolist()))
            - 3.0 * slow_giou(one, other)
        )
        assert cost[layer, query, number].item() == pytest.approx(expected, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 4), st.integers(0, 2), st.integers(0, 2**31))
def test_no_assignment_is_cheaper(objects, more, seed):
    random = torch.Generator().manual_seed(seed)
    cost = torch.randn(objects + more, objects, dtype=torch.float64, generator=random)
    (chosen,) = match([cost])
    assert len(set(chosen.tolist())) == objects
    total = sum(cost[query, number].item() for number, query in enumerate(chosen))
    every = itertools.permutations(range(objects + more), objects)
    best = min(sum(cost[query, n].item() for n, query in enumerate(one)) for one in every)
    assert total == pytest.approx(best)


def test_what_is_not_finite_is_never_preferred_and_never_ends_the_run():
    cost = torch.tensor([[0.0, 1.0], [math.nan, math.inf], [1.0, 0.0]])
    assert match([cost])[0].tolist() == [0, 2]
    assert sorted(match([torch.full((3, 2), math.nan)])[0].tolist()) == [0, 1]


def test_images_without_objects_are_matched_with_nothing():
    logits, boxes = torch.randn(2, 4, 6), torch.rand(2, 4, 4)
    cost = matching_cost(logits, boxes, torch.zeros(0).long(), torch.zeros(0, 4))
    assert cost.shape == (2, 4, 0)
    assert all(len(chosen) == 0 for chosen in match(list(cost)))
    assert match([]) == []
    assert match([cost[0]])[0].dtype == np.int64


CLASSES, QUERIES, LAYERS = 3, 4, 2


def problem(counts=(2, 0, 3)):
    torch.manual_seed(1)
    logits = torch.randn(LAYERS, len(counts), QUERIES, CLASSES + 1).double().requires_grad_()
    boxes = random_boxes(LAYERS, len(counts), QUERIES).requires_grad_()
    labels = [torch.randint(CLASSES, (count,)) for count in counts]
    return logits, boxes, labels, [random_boxes(count) for count in counts]


def slow(logits, boxes, labels, objects, layer, no_object):
    classes = weights = l1 = giou = 0.0
    right = 0
    for image, (label, target) in enumerate(zip(labels, objects)):
        cost = matching_cost(logits[layer, image], boxes[layer, image], label, target)
        best = min(
            itertools.permutations(range(QUERIES), len(label)),
            key=lambda one: sum(cost[q, n].item() for n, q in enumerate(one)),
        )
        owner = {query: number for number, query in enumerate(best)}
        for query in range(QUERIES):
            odds = [math.exp(value) for value in logits[layer, image, query].tolist()]
            wanted = label[owner[query]].item() if query in owner else CLASSES
            weight = 1.0 if query in owner else no_object
            classes -= weight * math.log(odds[wanted] / sum(odds))
            weights += weight
            if query in owner:
                box = boxes[layer, image, query].detach()
                l1 += (box - target[owner[query]]).abs().sum().item()
                giou += 1 - slow_giou(box, target[owner[query]])
                right += max(range(CLASSES), key=lambda c: odds[c]) == wanted
    return classes / weights, l1, giou, right


@pytest.mark.parametrize("no_object", [0.1, 1.0, 0.025])
def test_every_layer_is_judged_as_by_hand(no_object):
    logits, boxes, labels, objects = problem()
    layers = set_losses(logits, boxes, labels, objects, no_object=no_object)
    assert len(layers) == LAYERS
    for layer, losses in enumerate(layers):
        classes, l1, giou, right = slow(logits, boxes, labels, objects, layer, no_object)
        found = losses.classes.total / losses.classes.count
        assert found.item() == pytest.approx(classes, abs=1e-9)
        assert losses.l1.total.item() == pytest.approx(l1, abs=1e-9)
        assert losses.giou.total.item() == pytest.approx(giou, abs=1e-6)  # torchvision's eps
        assert losses.l1.count == losses.giou.count == losses.num_matched == 5
        assert losses.num_correct == right


@pytest.mark.parametrize("counts", [(2, 0, 3), (0, 0), ()])
def test_gradients_are_finite_also_without_objects(counts):
    logits, boxes, labels, objects = problem(counts)
    layers = set_losses(logits, boxes, labels, objects)
    sum(one.classes.total + one.l1.total + one.giou.total for one in layers).backward()
    assert torch.isfinite(logits.grad).all()
    assert torch.isfinite(boxes.grad).all()
    assert bool(logits.grad.abs().sum() > 0) == bool(counts)


def test_losses_that_are_not_finite_come_out_as_such():
    logits, boxes, labels, objects = problem()
    with torch.no_grad():
        boxes[:, 0] = math.nan
    layers = set_losses(logits, boxes, labels, objects)
    assert not torch.isfinite(layers[0].l1.total)
    assert torch.isfinite(layers[0].classes.total)


def test_refusals():
    logits, boxes, labels, objects = problem((5,))
    with pytest.raises(ValueError, match="5 objects are more than 4 queries"):
        set_losses(logits, boxes, labels, objects)
    with pytest.raises(ValueError, match=r"no_object 0\.0001 must be a multiple of 0\.001"):
        set_losses(logits, boxes, labels, objects, no_object=0.0001)
