"""Recall at k in both directions of retrieval, and bootstrap intervals for means over clusters.

Recall works on ranks: the number of wrong candidates that stand before the best right one (0 =
found first). A wrong candidate with an equal score stands before, so ties never inflate a figure;
in half precision ties are common (CLIP-style tables gained points from them). All figures are
shares between 0 and 1.

The bootstrap's unit is the image: captions of one image succeed and fail together, so drawing
captions one by one would print intervals that are too narrow. `scipy.stats.bootstrap` gives the
same intervals, but it refuses a single cluster and holds (resamples, clusters) numbers of every
figure at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RECALL_AT = (1, 5, 10)


def pessimistic_ranks(
    scores: NDArray[np.floating], positive: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Rank of each query's best right candidate from the full score matrix.

    Args:
        scores: (queries, candidates), higher is better. NaN counts as standing before everything
            when wrong and behind everything when right.
        positive: (queries, candidates), True = right answer.

    Returns:
        (queries,) number of wrong candidates whose score is at least that of the best right one.

    Raises:
        ValueError: the shapes differ, or a query has no right candidate.
    """
    if scores.shape != positive.shape or scores.ndim != 2:
        raise ValueError(f"scores {scores.shape} and positive {positive.shape} must be one matrix")
    without = np.flatnonzero(~positive.any(axis=1))
    if without.size:
        raise ValueError(f"query {without[0]} has no right candidate")
    right = np.where(positive & ~np.isnan(scores), scores, -np.inf)
    best = right.max(axis=1, keepdims=True)
    before = ~(scores < best) & ~positive
    return before.sum(axis=1).astype(np.int64)


def recall_at(ranks: NDArray[np.integer], k: int) -> float:
    """Share of queries whose best right candidate is among the first `k`.

    Raises:
        ValueError: there is no query, or k is below 1.
    """
    if k < 1:
        raise ValueError(f"recall at {k}: k starts at 1")
    if len(ranks) == 0:
        raise ValueError("recall of no queries")
    return float((np.asarray(ranks) < k).mean())


def chance_recall(positives: NDArray[np.integer], candidates: int, k: int) -> float:
    """Expected recall at k of a random order.

    A query with p right answers among n candidates misses all of them with probability
    C(n - p, k) / C(n, k) (hypergeometric); the mean over queries is returned.

    Args:
        positives: (queries,) number of right candidates of each query.
        candidates: number of candidates n.
        k: list length; above n it is n.

    Raises:
        ValueError: a query has no right candidate or more than there are candidates.
    """
    counts, queries = np.unique(np.asarray(positives), return_counts=True)
    if not counts.size or counts[0] < 1 or counts[-1] > candidates:
        raise ValueError(f"right candidates must number 1 to {candidates}")
    drawn = np.arange(min(k, candidates))
    # One factor per drawn item: the i-th draw is wrong too.
    wrong = np.clip(candidates - counts[:, None] - drawn, 0, None) / (candidates - drawn)
    return float(((1 - wrong.prod(axis=1)) * queries).sum() / queries.sum())


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
