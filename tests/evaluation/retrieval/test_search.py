from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.retrieval.rerank import search, similarity
from vlp.metrics.recall import pessimistic_ranks


def random_positives(generator, queries, candidates, most):
    table = np.full((queries, most), -1, dtype=np.int64)
    for row in table:
        count = generator.integers(1, most + 1)
        row[:count] = generator.choice(candidates, size=count, replace=False)
    return table


def full_mask(table, candidates):
    mask = np.zeros((len(table), candidates), dtype=bool)
    for row, right in enumerate(table):
        mask[row, right[right >= 0]] = True
    return mask


@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(3, 40), st.integers(0, 45))
@settings(max_examples=60, deadline=None)
def test_chunks_give_the_ranks_and_order_of_the_full_matrix(seed, queries, candidates, top):
    generator = np.random.default_rng(seed)
    # Halves and few channels: many exact ties.
    query = torch.from_numpy(generator.integers(-2, 3, (queries, 3)) / 2).float()
    candidate = torch.from_numpy(generator.integers(-2, 3, (candidates, 3)) / 2).float()
    positives = random_positives(generator, queries, candidates, 3)
    found = search(query, candidate, positives, top, query_chunk=4, candidate_chunk=7)
    scores = (query @ candidate.T).numpy()
    assert (
        found.ranks.tolist() == pessimistic_ranks(scores, full_mask(positives, candidates)).tolist()
    )
    order = np.argsort(-scores, axis=1, kind="stable")[:, :top]
    assert found.nearest.tolist() == order.tolist()
    np.testing.assert_array_equal(found.scores, np.take_along_axis(scores, order, axis=1))


def test_equal_images_tie_wherever_they_stand():
    """A float32 product gives equal columns different last bits in some places of a matrix."""
    torch.manual_seed(1)
    query = torch.nn.functional.normalize(torch.randn(50, 256), dim=-1)
    one = torch.nn.functional.normalize(torch.randn(1, 256), dim=-1)
    candidate = one.repeat(101, 1)
    found = search(query, candidate, np.full((50, 1), 3), query_chunk=7, candidate_chunk=11)
    assert found.ranks.tolist() == [100] * 50


def test_similarity_stays_float32_under_autocast():
    query, candidate = torch.randn(6, 64), torch.randn(9, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = similarity(query, candidate)
        rounded = query @ candidate.T
    assert rounded.dtype == torch.bfloat16  # what autocast does to a bare product
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, query @ candidate.T)


def test_nan_counts_against_the_model():
    query = torch.tensor([[1.0], [float("nan")]])
    candidate = torch.tensor([[3.0], [float("nan")], [1.0]])
    found = search(query, candidate, np.array([[0], [0]]), 2)
    assert found.ranks.tolist() == [1, 2]
    assert found.nearest[0].tolist() == [0, 2]


@pytest.mark.parametrize("value", [-3.5, -0.0, 0.0, 1e-30, 2.5])
def test_scores_survive_their_packing(value):
    found = search(torch.tensor([[value]]), torch.ones(1, 1), np.array([[0]]), 1)
    assert found.scores.item() == np.float32(value)
