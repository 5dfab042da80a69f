import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vlp.metrics import bootstrap_means, chance_recall, percentile_interval, pessimistic_ranks


def test_a_resample_without_queries_keeps_the_overall_mean():
    values, weights = np.array([[1.0], [0.0]]), np.array([[2.0], [0.0]])
    assert set(bootstrap_means(values, weights, resamples=50).ravel()) == {0.5}


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_means(np.zeros((0, 1)))
    with pytest.raises(ValueError, match="not one 2-D shape"):
        bootstrap_means(np.zeros((3, 1)), np.zeros((3, 2)))
    with pytest.raises(ValueError, match="query 1"):
        pessimistic_ranks(np.zeros((2, 2)), np.array([[True, False], [False, False]]))
    with pytest.raises(ValueError, match="1 to 3 positives"):
        chance_recall(np.array([0]), 3, 1)


def test_intervals_are_those_of_scipy():
    rng = np.random.default_rng(1)
    weights = rng.integers(1, 6, (80, 1))
    values = rng.binomial(weights, 0.6)
    low, high = percentile_interval(bootstrap_means(values, weights, resamples=300))
    theirs = stats.bootstrap(
        (values[:, 0], weights[:, 0]),
        lambda value, weight, axis: value.sum(axis) / weight.sum(axis),
        paired=True,
        n_resamples=300,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    assert (low[0], high[0]) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


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


def test_nan_scores_count_against_the_model():
    nan = float("nan")
    scores = np.array([[nan, 1.0, 0.0], [1.0, nan, 0.0], [2.0, 1.0, nan]])
    positive = np.array([[1, 0, 0], [1, 0, 0], [1, 0, 1]], dtype=bool)
    assert pessimistic_ranks(scores, positive).tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("candidates", "positives", "k"), [(5, [1], 1), (6, [2, 3], 2), (6, [1, 5], 4), (4, [2], 9)]
)
def test_chance_equals_counting_all_orders(candidates, positives, k):
    found = []
    for right in positives:
        orders = list(itertools.permutations(range(candidates)))
        found.append(np.mean([any(c < right for c in order[:k]) for order in orders]))
    assert chance_recall(np.array(positives), candidates, k) == pytest.approx(np.mean(found))
