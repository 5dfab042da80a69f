"""Variants against a reference over paired seeds: differences, tests, and what they can find."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

POWER, LEVEL = 0.8, 0.05
QUANTILES = 4000


class Difference(NamedTuple):
    """Of a variant from its reference over paired seeds, in points.

    mean, deviation: of the differences. p: of the paired t-test, two-sided. seeds: that both have.
    adjusted: p by Holm's correction for all tests of a table, where there is a table.
    """

    mean: float
    deviation: float
    p: float
    seeds: int
    adjusted: float | None = None

    def __str__(self) -> str:
        return self.text()

    @property
    def effect(self) -> float | None:
        """Cohen's d_z, mean / deviation; None where seeds are fewer than two or do not differ."""
        return self.mean / self.deviation if self.seeds > 1 and self.deviation > 0 else None

    def text(self, decimals: int = 1) -> str:
        """`+3.1 ± 1.2, p 0.041, Holm 0.082, d 2.6 [0.1, 5.1]`, or a dash below two seeds."""
        if self.seeds < 2:
            return "–"
        text = f"{self.mean:+.{decimals}f} ± {self.deviation:.{decimals}f}, {_p('p', self.p)}"
        if self.adjusted is not None:
            text += f", {_p('Holm', self.adjusted)}"
            if self.effect is not None:
                low, high = effect_interval(self.effect, self.seeds)
                text += f", d {self.effect:.1f} [{low:.1f}, {high:.1f}]"
        return text

    def to_json(self) -> dict[str, Any]:
        """Return all figures as plain JSON values, null where there are none."""
        found = {name: _finite(value) for name, value in self._asdict().items()}
        effect = _finite(self.effect)
        interval = None if effect is None else list(effect_interval(effect, self.seeds))
        return {**found, "effect": effect, "effect_interval": interval}


def _p(name: str, p: float) -> str:
    return f"{name} {p:.3f}" if p >= 0.001 else f"{name} < 0.001"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p values of one family of tests by Holm's step-down method.

    The i-th smallest of m is multiplied by m - i + 1, is at least the one before it, and at most 1
    (Holm, A simple sequentially rejective multiple test procedure, 1979).
    """
    values = np.asarray(p, dtype=float)
    order = np.argsort(values, kind="stable")
    adjusted = np.empty_like(values)
    factors = np.arange(len(values), 0, -1)
    adjusted[order] = np.minimum(1, np.maximum.accumulate(factors * values[order]))
    return [float(each) for each in adjusted]


def effect_interval(effect: float, seeds: int) -> tuple[float, float]:
    """Return the 95 % interval of Cohen's d_z from the noncentral t distribution.

    Its ends are the effects under which the t that was found, d_z · √seeds, lies at the upper and
    at the lower 2.5 %.

    Raises:
        ValueError: fewer than two seeds.
    """
    if seeds < 2:
        raise ValueError(f"an interval needs two seeds, not {seeds}")
    t = effect * math.sqrt(seeds)
    # Given the deviation, t - centre is normal: the mean over the quantiles of the deviation, where
    # scipy's own series gives NaN for large t.
    chi2 = stats.chi2.ppf((np.arange(QUANTILES) + 0.5) / QUANTILES, seeds - 1)
    scaled = t * np.sqrt(chi2 / (seeds - 1))

    def end(share: float) -> float:
        centre = optimize.brentq(
            lambda centre: float(stats.norm.cdf(scaled - centre).mean()) - share,
            scaled.min() - 9,
            scaled.max() + 9,
        )
        return float(centre) / math.sqrt(seeds)

    return end(1 - LEVEL / 2), end(LEVEL / 2)


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
