"""Percentile bootstrap intervals for means over clusters.

The unit that is drawn again is the image. Captions of one image succeed and fail together, so
drawing captions one by one would print intervals that are too narrow.

`scipy.stats.bootstrap` gives the same intervals, but it refuses a single cluster and holds
(resamples, clusters) numbers of every figure at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def bootstrap_means(
    values: NDArray[np.number],
    weights: NDArray[np.number] | None = None,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> NDArray[np.float64]:
    """Compute weighted means of clusters drawn with replacement.

    Args:
        values: (clusters, figures) sum of a figure over the cluster's queries, e.g. hits.
        weights: (clusters, figures) number of queries in the cluster; None = 1 each. A figure
            without any query in a resample keeps the mean of all clusters there.
        resamples: number of draws.
        seed: the same seed gives the same clusters, and so the same draw for every figure.

    Returns:
        (resamples, figures) sum of values / sum of weights in each resample.

    Raises:
        ValueError: no cluster, or shapes that differ.
    """
    values = np.asarray(values, dtype=np.float64)
    weights = np.ones_like(values) if weights is None else np.asarray(weights, dtype=np.float64)
    if values.ndim != 2 or values.shape != weights.shape:
        raise ValueError(f"values {values.shape} and weights {weights.shape} must be one matrix")
    clusters = len(values)
    if clusters == 0 or not (weights.sum(axis=0) > 0).all():
        raise ValueError("a bootstrap needs at least one cluster with a query")
    generator = np.random.default_rng(seed)
    overall = values.sum(axis=0) / weights.sum(axis=0)
    means = np.empty((resamples, values.shape[1]))
    for row in range(resamples):
        times = np.bincount(generator.integers(clusters, size=clusters), minlength=clusters)
        total = times @ weights
        means[row] = np.where(total > 0, (times @ values) / np.where(total > 0, total, 1), overall)
    return means


def percentile_interval(
    means: NDArray[np.floating], confidence: float = 0.95
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the central interval over the first axis of resampled means.

    It has no width where all clusters agree (recall 0 or 1): there it says nothing about how the
    figure would be on other images.

    Returns:
        low and high, each of the shape of one resample.
    """
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return low, high
