"""Recall at k for retrieval in both directions, with several captions per image.

Everything here works on ranks: the number of wrong candidates that stand before the best right one
(0 = found first). A wrong candidate with an equal score stands before, so ties never inflate a
figure; in half precision ties are common (CLIP-style tables gained points from them). All figures
are shares between 0 and 1.
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
