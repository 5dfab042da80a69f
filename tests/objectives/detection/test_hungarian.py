"""The bipartite matching of DETR against all assignments there are, and its cost by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from boxes_by_hand import random_boxes, slow_giou
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp.tasks.detection.loss import match, matching_cost


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
    cost = torch.randn(
        objects + more, objects, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
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


def test_more_objects_than_queries_are_refused():
    with pytest.raises(ValueError, match="3 objects are more than 2 queries"):
        match([torch.zeros(2, 3)])


def test_images_without_objects_are_matched_with_nothing():
    cost = matching_cost(
        torch.randn(2, 4, 6), torch.rand(2, 4, 4), torch.zeros(0).long(), torch.zeros(0, 4)
    )
    assert cost.shape == (2, 4, 0)
    assert all(len(chosen) == 0 for chosen in match(list(cost)))
    assert match([]) == []
    assert match([cost[0]])[0].dtype == np.int64
