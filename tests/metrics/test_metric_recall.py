from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp.metrics import chance_recall, pessimistic_ranks


def slow_rank(scores, positive):
    """Sort with every wrong candidate placed before an equal right one; find the first right."""
    order = sorted(range(len(scores)), key=lambda c: (-scores[c], positive[c]))
    return next(place for place, candidate in enumerate(order) if positive[candidate])


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_ranks_equal_a_sort_with_ties_against_the_model(data):
    queries = data.draw(st.integers(1, 4))
    candidates = data.draw(st.integers(1, 7))
    # Few distinct scores, so that ties are frequent.
    score = st.integers(-2, 2).map(float)
    scores = np.array(
        [[data.draw(score) for _ in range(candidates)] for _ in range(queries)], dtype=np.float32
    )
    positive = np.zeros((queries, candidates), dtype=bool)
    for query in range(queries):
        right = st.sets(st.integers(0, candidates - 1), min_size=1)
        positive[query, list(data.draw(right))] = True
    expected = [slow_rank(scores[q], positive[q]) for q in range(queries)]
    assert pessimistic_ranks(scores, positive).tolist() == expected


def test_constant_scores_find_nothing():
    scores = np.zeros((4, 12), dtype=np.float32)
    positive = np.eye(4, 12, dtype=bool)
    ranks = pessimistic_ranks(scores, positive)
    assert ranks.tolist() == [11] * 4


def test_nan_scores_count_against_the_model():
    nan = float("nan")
    scores = np.array([[nan, 1.0, 0.0], [1.0, nan, 0.0], [2.0, 1.0, nan]])
    positive = np.array([[1, 0, 0], [1, 0, 0], [1, 0, 1]], dtype=bool)
    assert pessimistic_ranks(scores, positive).tolist() == [2, 1, 0]


def test_a_query_without_a_right_candidate_is_an_error():
    with pytest.raises(ValueError, match="query 1"):
        pessimistic_ranks(np.zeros((2, 2)), np.array([[True, False], [False, False]]))


@pytest.mark.parametrize(
    ("candidates", "positives", "k"), [(5, [1], 1), (6, [2, 3], 2), (6, [1, 5], 4), (4, [2], 9)]
)
def test_chance_equals_counting_all_orders(candidates, positives, k):
    found = []
    for right in positives:
        orders = list(itertools.permutations(range(candidates)))
        found.append(np.mean([any(c < right for c in order[:k]) for order in orders]))
    assert chance_recall(np.array(positives), candidates, k) == pytest.approx(np.mean(found))


def test_chance_of_five_captions_and_of_one():
    assert chance_recall(np.ones(5000, int), 1000, 10) == pytest.approx(0.01)
    wrong = np.prod([(5000 - 5 - i) / (5000 - i) for i in range(10)])
    assert chance_recall(np.full(1000, 5), 5000, 10) == pytest.approx(1 - wrong)
    with pytest.raises(ValueError, match="1 to 3"):
        chance_recall(np.array([0]), 3, 1)
