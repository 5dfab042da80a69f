"""Two models on the same items: difference, interval and tests, by image.

Items of one image succeed and fail together, so images are what is drawn again (bootstrap) and
what changes sides (sign-flip test). McNemar's test is over items, as papers report it; it takes
them as independent.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from vlp.metrics.bootstrap import bootstrap_means, percentile_interval

_AT_ONCE = 2**24
"""Signs in memory at once."""


class ItemDifference(NamedTuple):
    """One figure of two models, second minus first.

    first, second: means over the items. difference with its 95 % bootstrap interval low, high. p:
    two-sided, of the sign-flip test over images. mcnemar: two-sided exact p, None where a value
    is neither 0 nor 1. only_first, only_second: items where one is higher. items: their number.
    """

    first: float
    second: float
    difference: float
    low: float
    high: float
    p: float
    mcnemar: float | None
    only_first: int
    only_second: int
    items: int


def item_difference(
    first: NDArray[np.floating],
    second: NDArray[np.floating],
    clusters: Sequence[Hashable],
    *,
    resamples: int = 2000,
    permutations: int = 10_000,
    seed: int = 0,
) -> ItemDifference:
    """Compare two models item by item.

    Args:
        first: (items,) values of one model.
        second: of the other, for the same items.
        clusters: the image of each item.
        resamples: bootstrap draws.
        permutations: of the sign-flip test; the smallest p is 1 / (permutations + 1).
        seed: of both.

    Raises:
        ValueError: there is no item, or the lengths differ.
    """
    if not len(first) or len({len(first), len(second), len(clusters)}) > 1:
        raise ValueError(
            f"{len(first)} and {len(second)} values and {len(clusters)} images: a comparison "
            "needs as many of each, and one at least"
        )
    gap = np.asarray(second, dtype=float) - np.asarray(first, dtype=float)
    numbers: dict[Hashable, int] = {}
    own = np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters])
    sums: NDArray[np.float64] = np.bincount(own, gap).astype(float)
    weights = np.bincount(own).astype(float)
    means = bootstrap_means(sums[:, None], weights[:, None], resamples=resamples, seed=seed)
    low, high = percentile_interval(means)
    return ItemDifference(
        first=float(np.mean(first)),
        second=float(np.mean(second)),
        difference=float(gap.mean()),
        low=float(low[0]),
        high=float(high[0]),
        p=sign_flip_p(sums, permutations, seed),
        mcnemar=_mcnemar(first, second),
        only_first=int((gap < 0).sum()),
        only_second=int((gap > 0).sum()),
        items=len(gap),
    )


def sign_flip_p(
    differences: NDArray[np.floating], permutations: int = 10_000, seed: int = 0
) -> float:
    """Two-sided p that independent differences are as far from 0 in sum as they are, by chance.

    Under the null hypothesis each difference is as likely with the other sign. Up to 12 differences
    that are not 0 all signs are tried; else some are drawn, and p counts the data as one draw.

    Args:
        differences: (clusters,) of each image.
        permutations: random choices of signs.
        seed: of these choices.
    """
    own = differences[differences != 0].astype(float)
    if not len(own):
        return 1.0
    observed = abs(own.sum()) - 1e-9 * np.abs(own).sum()
    if len(own) <= 12:
        bits = (np.arange(2 ** len(own))[:, None] >> np.arange(len(own))) & 1
        return float((np.abs((1 - 2 * bits) @ own) >= observed).mean())
    generator = np.random.default_rng(seed)
    step, reached = max(1, _AT_ONCE // len(own)), 0
    for start in range(0, permutations, step):
        size = (min(step, permutations - start), len(own))
        signs = 1 - 2 * generator.integers(0, 2, size=size, dtype=np.int8)
        reached += int((np.abs(signs @ own) >= observed).sum())
    return (1 + reached) / (1 + permutations)


def _mcnemar(first: NDArray[np.floating], second: NDArray[np.floating]) -> float | None:
    if not np.isin(first, (0, 1)).all() or not np.isin(second, (0, 1)).all():
        return None
    lost, won = int((first > second).sum()), int((second > first).sum())
    if lost + won == 0:
        return 1.0
    return float(stats.binomtest(won, lost + won).pvalue)
