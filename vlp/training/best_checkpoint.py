"""Best checkpoint by a validation metric, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from vlp.config import ConfigError
from vlp.training.engines.compile import force_eager
from vlp.training.progress import Progress

# Returns full float32 parameters by name; collective.
Parameters = Callable[[], dict[str, Tensor]]

# Returns validation metrics, equal on all ranks; collective. Lower `loss/...` is better.
Validate = Callable[[Parameters], Mapping[str, float]]


class BestCheckpoint:
    """Validation at intervals, with the best result so far.

    Args:
        metric: the metric that decides.
        every: steps between validations; the last step is always validated.
        patience: validations without a better result before the run ends; None never ends it.
        data: identity of the validation data; a resumed run forgets the best result on other data.
    """

    def __init__(
        self,
        validate: Validate,
        metric: str,
        every: int,
        patience: int | None = None,
        data: str = "",
    ) -> None:
        self._validate, self._metric, self._every = validate, metric, every
        self._patience, self._data = patience, data
        self._sign = -1 if metric.startswith("loss/") else 1

    def due(self, progress: Progress, total: int) -> bool:
        """Return whether a validation is due; `total` are the steps of the run."""
        step = progress.step
        return step > progress.looked and (step % self._every == 0 or step >= total)

    def validate(
        self, progress: Progress, parameters: Parameters
    ) -> tuple[Mapping[str, float], bool]:
        """Validate the model and record the result in `progress`.

        Return all metrics, and whether the model is the best so far. `parameters` returns full
        parameters where ranks hold shards.
        """
        with force_eager():
            metrics = self._validate(parameters)
        self.require(metrics)
        value = metrics[self._metric]
        # A resumed run may have another metric or other data.
        if progress.best is not None and progress.metric != self._metric:
            progress.best, progress.looks_since = progress.best_figures.get(self._metric), 0
        if progress.best is not None and progress.validation != self._data:
            progress.best, progress.looks_since = None, 0
        progress.metric, progress.validation = self._metric, self._data
        progress.looked = progress.step
        better = math.isfinite(value) and (
            progress.best is None or self._sign * value > self._sign * progress.best
        )
        if better:
            progress.best, progress.best_step = value, progress.step
            progress.best_figures, progress.looks_since = dict(metrics), 0
        else:
            progress.looks_since += 1
        return metrics, better

    def require(self, metrics: Collection[str]) -> None:
        """Require that the deciding metric is among `metrics`."""
        if self._metric not in metrics:
            raise ConfigError(
                f"training.metric: there is no metric {self._metric!r}; choose one of "
                f"{', '.join(metrics)}"
            )

    def exhausted(self, progress: Progress) -> bool:
        """Return whether `patience` validations in a row were not better."""
        if self._patience is None or progress.validation != self._data:
            return False
        return progress.looks_since >= self._patience
