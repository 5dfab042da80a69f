"""Unbounded minima against the definition: every place compared with every other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp.positions.anchor import (
    anchor_distance,
    anchor_path,
    chebyshev_distance,
    distance_along_axis,
    manhattan_distance,
)

METRICS = {
    "manhattan": (manhattan_distance, lambda down, right: down + right),
    "chebyshev": (chebyshev_distance, torch.maximum),
}


def plane(rows, columns, tokens, holes, seed, dtype=torch.float64):
    """Values of which the share `holes` is +inf."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, rows, columns, tokens)
    x = torch.rand(shape, generator=generator, dtype=torch.float64) * 20 + 1
    empty = torch.rand(shape, generator=generator) < holes
    return x.masked_fill(empty, math.inf).to(dtype)


def slow(x, metric):
    rows, columns = x.shape[-3:-1]
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    row, column = row.flatten(), column.flatten()
    length = METRICS[metric][1](
        (row[:, None] - row).abs(), (column[:, None] - column).abs()
    )  # (M, M)
    sums = x.flatten(-3, -2)[:, None] + length[None, :, :, None]
    return sums.amin(2).view_as(x)


@settings(max_examples=60, deadline=None)
@given(
    metric=st.sampled_from(sorted(METRICS)),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    tokens=st.integers(1, 3),
    holes=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    seed=st.integers(0, 1000),
)
def test_equals_all_pairs(metric, rows, columns, tokens, holes, seed):
    x = plane(rows, columns, tokens, holes, seed)
    fast = METRICS[metric][0](x)
    torch.testing.assert_close(fast, slow(x, metric), rtol=0, atol=1e-9)


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_float32_keeps_its_digits_at_the_largest_grid(metric):
    x = plane(24, 24, 4, 0.95, 0)
    fast = METRICS[metric][0](x.float())
    torch.testing.assert_close(fast.double(), slow(x, metric), rtol=0, atol=2e-5)


def test_a_single_value_spreads_in_straight_lines():
    x = torch.full((5,), math.inf).index_fill(0, torch.tensor(1), 3.0)
    assert distance_along_axis(x, 0).tolist() == [4.0, 3.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize("metric", [*sorted(METRICS), "euclidean"])
def test_gradients_of_the_unbounded_path(metric):
    generator = torch.Generator().manual_seed(3)
    similarity = torch.rand(12, 5, 2, generator=generator, dtype=torch.float64) * 1.4 - 0.7
    similarity.requires_grad_()
    mask = torch.tensor([True, True, False, True, True])

    def path(similarity):
        return anchor_path(anchor_distance(similarity, 0.3), (3, 4), mask, None, None, metric)[0]

    assert torch.autograd.gradcheck(path, similarity, eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_where_nothing_is_an_anchor_nothing_is_reachable_and_gradients_are_zero(metric):
    similarity = torch.zeros(6, 3, 1, requires_grad=True)
    distance = anchor_distance(similarity, 0.3)
    path, reachable = anchor_path(distance, (2, 3), None, None, None, metric)
    assert not reachable.any()
    assert not path.any()
    path.sum().backward()
    assert not similarity.grad.any()
