from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from vlp.metrics import bootstrap_means, percentile_interval


def test_means_equal_a_plain_loop_over_the_same_draws():
    generator = np.random.default_rng(3)
    weights = generator.integers(1, 6, size=(9, 2)).astype(float)
    values = weights * generator.random((9, 2))
    means = bootstrap_means(values, weights, resamples=20, seed=5)
    rng_for = np.random.default_rng(5)
    for row in means:
        chosen = rng_for.integers(9, size=9)
        total = sum(values[c] for c in chosen) / sum(weights[c] for c in chosen)
        np.testing.assert_allclose(row, total)


def test_seed_decides_the_draws():
    values = np.random.default_rng(0).random((30, 1))
    first = bootstrap_means(values, resamples=50, seed=1)
    np.testing.assert_array_equal(first, bootstrap_means(values, resamples=50, seed=1))
    assert (first != bootstrap_means(values, resamples=50, seed=2)).any()


def test_a_resample_without_queries_keeps_the_overall_mean():
    values, weights = np.array([[1.0], [0.0]]), np.array([[2.0], [0.0]])
    assert set(bootstrap_means(values, weights, resamples=50).ravel()) == {0.5}


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_means(np.zeros((0, 1)))
    with pytest.raises(ValueError, match="one matrix"):
        bootstrap_means(np.zeros((3, 1)), np.zeros((3, 2)))


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
