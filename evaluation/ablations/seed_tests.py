"""Variants against a reference over paired seeds: differences, tests, and what they can find."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

POWER, LEVEL = 0.8, 0.05


class Difference(NamedTuple):
    """Of a variant from its reference over paired seeds, in points: mean, deviation, p, seeds."""

    mean: float
    deviation: float
    p: float
    seeds: int

    def __str__(self) -> str:
        return self.text()

    def text(self, decimals: int = 1) -> str:
        """`+3.1 ± 1.2, p 0.041`, or a dash for fewer than two seeds."""
        if self.seeds < 2:
            return "–"
        p = f"p {self.p:.3f}" if self.p >= 0.001 else "p < 0.001"
        return f"{self.mean:+.{decimals}f} ± {self.deviation:.{decimals}f}, {p}"


def detectable(deviation: float, seeds: int) -> float:
    """Smallest mean difference that a paired, two-sided t-test finds at 5 % with 80 % power.

    The usual approximation by the quantiles of t; `deviation` is that of one seed's difference.

    Raises:
        ValueError: fewer than two seeds.
    """
    if seeds < 2:
        raise ValueError(f"a paired test needs two seeds, not {seeds}")
    quantiles = stats.t.ppf(1 - LEVEL / 2, seeds - 1) + stats.t.ppf(POWER, seeds - 1)
    return float(quantiles * deviation / math.sqrt(seeds))


def difference(values: Sequence[float], reference: Sequence[float]) -> Difference:
    """Paired t-test (two-sided); values of equal seeds stand at equal places."""
    gap = np.asarray(values, dtype=float) - np.asarray(reference, dtype=float)
    if len(gap) < 2:
        return Difference(float(gap.mean()) if len(gap) else math.nan, math.nan, math.nan, len(gap))
    deviation = float(gap.std(ddof=1))
    if deviation == 0:
        p = 1.0 if gap[0] == 0 else 0.0
    else:
        p = float(stats.ttest_rel(values, reference).pvalue)
    return Difference(float(gap.mean()), deviation, p, len(gap))


def mean_and_deviation(values: NDArray[np.float64], decimals: int = 1) -> str:
    """`71.0 ± 1.2`, or a dash where there is nothing."""
    if not len(values):
        return "–"
    spread = f" ± {values.std(ddof=1):.{decimals}f}" if len(values) > 1 else ""
    return f"{values.mean():.{decimals}f}{spread}"
