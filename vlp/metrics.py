"""Ranks, recall by chance, and bootstrap intervals for means over clusters.

A rank is the number of wrong candidates before the best right one, ties included, so that ties,
common in half precision, never inflate a figure. Figures are shares between 0 and 1.

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
    """Return (queries,) numbers of wrong candidates that score at least as the best right one.

    `scores` and `positive` (True = right answer) are (queries, candidates). NaN ranks first when
    wrong and last when right.
    """
    if scores.shape != positive.shape or scores.ndim != 2:
        raise ValueError(f"scores {scores.shape} and positive {positive.shape} must be one matrix")
    no_positive = np.flatnonzero(~positive.any(axis=1))
    if no_positive.size:
        raise ValueError(f"query {no_positive[0]} has no right candidate")
    right = np.where(positive & ~np.isnan(scores), scores, -np.inf)
    best = right.max(axis=1, keepdims=True)
    before = ~(scores < best) & ~positive
    return before.sum(axis=1).astype(np.int64)


def chance_recall(positives: NDArray[np.integer], candidates: int, k: int) -> float:
    """Return the expected recall at k of a random order, the mean over queries.

    A query with p of `positives` (queries,) among n candidates misses all of them with probability
    C(n - p, k) / C(n, k) (hypergeometric).
    """
    counts, queries = np.unique(np.asarray(positives), return_counts=True)
    if not counts.size or counts[0] < 1 or counts[-1] > candidates:
        raise ValueError(f"right candidates must number 1 to {candidates}")
    draws = np.arange(min(k, candidates))
    # One factor per drawn item: the i-th draw is wrong too.
    wrong = np.clip(candidates - counts[:, None] - draws, 0, None) / (candidates - draws)
    return float(((1 - wrong.prod(axis=1)) * queries).sum() / queries.sum())


def bootstrap_means(
    values: NDArray[np.number],
    weights: NDArray[np.number] | None = None,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> NDArray[np.float64]:
    """Compute (resamples, figures) weighted means of clusters drawn with replacement.

    `values` (clusters, figures) are sums over the cluster's queries, `weights` alike their number,
    1 each by default. A figure without any query in a resample keeps the mean of all clusters. A
    seed draws the same clusters for every figure.
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
    """Return low and high of the central interval over the first axis of resampled means."""
    # It has no width where all clusters agree (recall 0 or 1), and then predicts nothing.
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return low, high
