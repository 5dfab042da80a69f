"""Ranks, recall by chance, and bootstrap intervals for means over clusters.

The rank of a query is the number of negatives that score at least as high as its best positive, so
that ties, common in half precision, never inflate a recall. Recalls are between 0 and 1.

The bootstrap draws images, as captions of one image succeed and fail together.
`scipy.stats.bootstrap` gives the same intervals, but it refuses a single cluster and holds
(resamples, clusters) numbers of every figure at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RECALL_AT = (1, 5, 10)


def pessimistic_ranks(
    scores: NDArray[np.floating], positive: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return the rank of each query's best positive, from 0: (queries,).

    `scores` and `positive` (True = a right answer) are (queries, candidates). NaN counts as the
    highest score of a negative and as the lowest of a positive.
    """
    if scores.shape != positive.shape or scores.ndim != 2:
        raise ValueError(f"scores {scores.shape}, positive {positive.shape}: not one 2-D shape")
    no_positive = np.flatnonzero(~positive.any(axis=1))
    if no_positive.size:
        raise ValueError(f"query {no_positive[0]} has no positive")
    positive_scores = np.where(positive & ~np.isnan(scores), scores, -np.inf)
    best = positive_scores.max(axis=1, keepdims=True)
    ahead = ~(scores < best) & ~positive  # not `>=`, so that NaN is ahead
    return ahead.sum(axis=1).astype(np.int64)


def chance_recall(positives: NDArray[np.integer], candidates: int, k: int) -> float:
    """Return the expected recall at k of a random order, the mean over queries.

    A query with p positives among n candidates misses all of them with probability
    C(n - p, k) / C(n, k) (hypergeometric). `positives` (queries,) has p of each query,
    `candidates` is n.
    """
    counts, queries = np.unique(np.asarray(positives), return_counts=True)
    if not counts.size or counts[0] < 1 or counts[-1] > candidates:
        raise ValueError(f"each query needs 1 to {candidates} positives")
    draws = np.arange(min(k, candidates))
    # Factor i: the i-th of the k draws is a negative, given that all earlier draws were.
    misses = np.clip(candidates - counts[:, None] - draws, 0, None) / (candidates - draws)
    return float(((1 - misses.prod(axis=1)) * queries).sum() / queries.sum())


def bootstrap_means(
    values: NDArray[np.number],
    weights: NDArray[np.number] | None = None,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> NDArray[np.float64]:
    """Compute (resamples, figures) weighted means of clusters drawn with replacement.

    `values` (clusters, figures) are sums over the queries of each cluster, `weights` (clusters,
    figures) numbers of these queries, by default 1. All figures share the drawn clusters. A figure
    without any query in a resample keeps the mean of all clusters.
    """
    values = np.asarray(values, dtype=np.float64)
    weights = np.ones_like(values) if weights is None else np.asarray(weights, dtype=np.float64)
    if values.ndim != 2 or values.shape != weights.shape:
        raise ValueError(f"values {values.shape}, weights {weights.shape}: not one 2-D shape")
    clusters = len(values)
    if clusters == 0 or not (weights.sum(axis=0) > 0).all():
        raise ValueError("a bootstrap needs at least one cluster with a query")
    generator = np.random.default_rng(seed)
    overall = values.sum(axis=0) / weights.sum(axis=0)
    means = np.empty((resamples, values.shape[1]))
    for row in range(resamples):
        draws = np.bincount(generator.integers(clusters, size=clusters), minlength=clusters)
        total = draws @ weights
        means[row] = np.where(total > 0, (draws @ values) / np.where(total > 0, total, 1), overall)
    return means


def percentile_interval(
    means: NDArray[np.floating],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the bounds of the central 95 % interval over the first axis of `means`."""
    # If all clusters agree (recall 0 or 1), its width is 0, which says nothing about new data.
    tail = (1 - 0.95) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return low, high
