"""Progress of a run: the small part of a checkpoint, and the numbers of the report."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Progress:
    """Counters of a run; with weights and extra state they are all that resuming needs.

    step: optimiser steps done, skipped ones too. samples: consumed by all ranks over all epochs,
    which fixes the data position. trained_samples: those of them that were not bad. seconds: of
    training. skipped: bad samples by kind; examples: where some of them were. non_finite: skipped
    steps; non_finite_row: of these, the current row. resumed: the steps at which the run was
    resumed. looked: the last step that was validated. metric: what decided, of which data
    (validation). best: the best result so far, best_figures all metrics of that step, and
    looks_since the number of validations after it.
    """

    step: int = 0
    samples: int = 0
    trained_samples: int = 0
    seconds: float = 0.0
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    non_finite: int = 0
    non_finite_row: int = 0
    resumed: list[int] = field(default_factory=list)
    looked: int = 0
    metric: str | None = None
    validation: str = ""
    best: float | None = None
    best_step: int | None = None
    best_figures: dict[str, float] = field(default_factory=dict)
    looks_since: int = 0
