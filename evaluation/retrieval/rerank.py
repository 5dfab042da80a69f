"""Re-ranking the dual encoder's nearest candidates with the cross-modal encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evaluation.core.work_sharding import Ranks
from evaluation.retrieval.search import NOTHING, Search


class CandidatePairs(NamedTuple):
    """Different (image, text) pairs in a fixed order: image (P,) and text (P,) int64 indices."""

    image: NDArray[np.int64]
    text: NDArray[np.int64]


def nearest_pairs(text_to_image: Search, image_to_text: Search) -> CandidatePairs:
    """Each pair that is near in either direction, once, sorted by image, then text."""
    text = np.arange(len(text_to_image.nearest))[:, None]
    image = np.arange(len(image_to_text.nearest))[:, None]
    both = np.concatenate(
        [
            (text_to_image.nearest * len(text) + text).ravel(),
            (image * len(text) + image_to_text.nearest).ravel(),
        ]
    )
    code = np.unique(both)
    return CandidatePairs(code // max(len(text), 1), code % max(len(text), 1))


def match_pairs(
    pairs: CandidatePairs,
    match: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]],
    group: NDArray[np.int64],
    order: NDArray[np.int64],
    batch: int,
    *,
    ranks: Ranks | None = None,
    step: Callable[[int], object] = lambda pairs: None,
) -> NDArray[np.float32]:
    """Score all pairs, group after group, shared by the ranks.

    Args:
        pairs: what to score.
        match: image and text indices of at most `batch` pairs, of one group -> (pairs,).
        group: (P,) number of the group each pair is of; they come in the order of their numbers.
        order: (P,) by which the pairs of a group are sorted before they are cut into batches.
        batch: most pairs of one call.
        ranks: who shares the work.
        step: told the number of pairs after each call.

    Returns:
        (P,) float32 in the order of `pairs`.
    """
    ranks = ranks or Ranks.current()
    chosen = np.lexsort((order, group))
    ends = np.flatnonzero(np.diff(group[chosen])) + 1
    batches = [
        part
        for one in np.split(chosen, ends)
        if len(one)
        for part in np.array_split(one, -(-len(one) // batch))
    ]

    def score(number: int) -> NDArray[np.float32]:
        here = batches[number]
        scores = match(pairs.image[here], pairs.text[here])
        step(len(here))
        return scores

    scored = ranks.map_blocks(len(batches), score)
    result = np.empty(len(chosen), dtype=np.float32)
    for here, scores in zip(batches, scored):
        result[here] = scores
    return result


def look_up(
    pairs: CandidatePairs,
    values: NDArray[np.float32],
    texts: int,
    image: NDArray[np.int64],
    text: NDArray[np.int64],
) -> NDArray[np.float32]:
    """Values of given pairs, all of which are in `pairs`; shapes as `image` and `text`."""
    index = np.searchsorted(pairs.image * texts + pairs.text, image * texts + text)
    return values[index]


def reranked_ranks(
    found: Search, scores: NDArray[np.floating], positives: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Ranks after the nearest candidates were put into a new order among themselves.

    All others keep their order behind them, so a query without a right candidate among its nearest
    keeps its rank. Ties and NaN count against the model.

    Args:
        found: the dual encoder's search.
        scores: (queries, top) new scores of `found.nearest`.
        positives: (queries, most) right candidates, filled up with -1.
    """
    right = np.zeros(scores.shape, dtype=bool)
    for column in positives.T:
        right |= (found.nearest == column[:, None]) & (column[:, None] != NOTHING)
    best = np.where(right & ~np.isnan(scores), scores, -np.inf).max(
        axis=1, keepdims=True, initial=-np.inf
    )
    before = (~(scores < best) & ~right).sum(axis=1)
    return np.where(right.any(axis=1), before, found.ranks)
