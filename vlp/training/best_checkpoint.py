"""Which model of a run is kept as its best, and when there is no use in going on."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from vlp.config import ConfigError
from vlp.training.logging.progress import Progress

Judge = Callable[[], Mapping[str, float]]
"""Figures of the validation data, higher is better, the same on every rank; collective."""


class BestCheckpoint:
    """Looks at the validation data now and then.

    Args:
        judge: gives the figures of the model as it is.
        metric: the figure that decides.
        every: steps between looks; there is always one after the last step.
        patience: looks without a better figure after which the run ends; None is never.
    """

    def __init__(self, judge: Judge, metric: str, every: int, patience: int | None = None) -> None:
        self._judge, self._metric, self._every = judge, metric, every
        self._patience = patience

    def due(self, progress: Progress, total: int) -> bool:
        """Whether it is time, `total` being the steps of the run, and nobody has looked yet."""
        step = progress.step
        return step > progress.looked and (step % self._every == 0 or step >= total)

    def look(self, progress: Progress) -> tuple[Mapping[str, float], bool]:
        """Judge the model and count it in `progress`.

        Returns:
            All figures, and whether the model is better than every one before.

        Raises:
            ConfigError: there is no figure of that name; those that there are are named.
        """
        figures = self._judge()
        self.require(figures)
        value = figures[self._metric]
        progress.looked = progress.step
        better = math.isfinite(value) and (progress.best is None or value > progress.best)
        if better:
            progress.best, progress.best_step = value, progress.step
            progress.best_figures, progress.looks_since = dict(figures), 0
        else:
            progress.looks_since += 1
        return figures, better

    def require(self, figures: Collection[str]) -> None:
        """Refuse names of figures that lack the one that decides.

        Raises:
            ConfigError: see `look`.
        """
        if self._metric not in figures:
            raise ConfigError(
                f"training.metric: there is no figure {self._metric!r}; there are "
                f"{', '.join(figures)}"
            )

    def exhausted(self, progress: Progress) -> bool:
        """Whether the run has waited long enough for a better model."""
        return self._patience is not None and progress.looks_since >= self._patience
