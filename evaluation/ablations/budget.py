"""Budgets of ablations: what each variant takes, and what a number of minutes leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evaluation.ablations.config import AblationConfig
from evaluation.ablations.runs import Results
from evaluation.results import Table
from vlp.config import ConfigError

Pair = tuple[str, int]
"""Variant and seed."""


class Budget(NamedTuple):
    """Runs of an ablation within a number of minutes.

    runs: all, most important first. done: finished ones, which cost nothing. kept: those to have.
    minutes: of a run of each variant, training and evaluation; None where nothing tells it yet.
    jobs: runs side by side. limit: minutes in all, or None.
    """

    runs: list[Pair]
    done: set[Pair]
    kept: set[Pair]
    minutes: dict[str, float | None]
    jobs: int
    limit: float | None

    @property
    def known(self) -> bool:
        """Tell whether every variant's minutes are known."""
        return None not in self.minutes.values()

    @property
    def left_out(self) -> list[Pair]:
        """Runs that the limit leaves out."""
        return [pair for pair in self.runs if pair not in self.kept]

    def total(self) -> float:
        """Return the minutes of the runs that are still to be done, `jobs` side by side."""
        todo = [name for name, seed in self.runs if (name, seed) in self.kept - self.done]
        return sum(self.minutes[name] or 0.0 for name in todo) / self.jobs

    def text(self) -> str:
        """Lay out the plan: a line for each variant, the total, and what is left out by name."""
        rows = []
        for name, minutes in self.minutes.items():
            own = [pair for pair in self.runs if pair[0] == name]
            todo = [pair for pair in own if pair in self.kept - self.done]
            cut = [str(seed) for _, seed in own if (name, seed) not in self.kept]
            each = "?" if minutes is None else f"{minutes:.1f}"
            whole = "?" if minutes is None else f"{minutes * len(todo):.1f}"
            done = len(self.done.intersection(own))
            rows.append([name, str(len(own)), str(done), each, whole, ", ".join(cut) or "–"])
        head = ["variant", "seeds", "done", "minutes a run", "minutes to do", "seeds left out"]
        return Table("Plan", head, rows, self._notes()).text()

    def _notes(self) -> list[str]:
        todo = len(self.kept - self.done)
        if not self.known:
            notes = [f"{todo} runs to do; --minutes-a-run or a finished run tells how long."]
        else:
            notes = [
                f"{todo} runs to do in {self.total():.0f} minutes, {self.jobs} side by side. A "
                "variant's minutes are the mean of its finished runs, else of all finished runs, "
                "else --minutes-a-run."
            ]
        if self.limit is not None and self.known:
            names = list(dict.fromkeys(name for name, _ in self.left_out))
            notes.append(
                f"{self.limit:g} minutes leave out {len(self.left_out)} runs of {', '.join(names)}."
                if names
                else f"{self.limit:g} minutes leave out nothing."
            )
        return notes


def make_budget(
    config: AblationConfig,
    results: Results,
    only: Sequence[str] = (),
    minutes_a_run: float | None = None,
    limit: float | None = None,
) -> Budget:
    """Estimate every run, and keep the first ones that fit into `limit` minutes.

    Main rows come first, variants with the fewest seeds last. Runs after the first that does not
    fit are left out, so that the variants of a table have the same seeds. Where a run's minutes
    are not known yet, a limit keeps the first run alone: it tells them.

    Args:
        config: the ablation.
        results: of the finished runs.
        only: these variants; none means all.
        minutes_a_run: of a run of which no finished run tells anything.
        limit: minutes in all; None keeps everything.

    Raises:
        ConfigError: `only` names an unknown variant, or a limit is set where there are backbones.
    """
    if limit is not None and config.backbones:
        raise ConfigError("--budget: the time of `backbones` is not estimated; leave it out")
    runs = config.runs(only)
    names = dict.fromkeys(name for name, _ in runs)
    minutes = {name: _minutes(config, results, name, minutes_a_run) for name in names}
    done = {pair for pair in runs if pair in results}
    todo = [pair for pair in runs if pair not in done]
    if limit is not None:
        todo = todo[: _fitting([minutes[name] for name, _ in todo], limit * config.jobs)]
    return Budget(runs, done, done | set(todo), minutes, config.jobs, limit)


def _fitting(minutes: Sequence[float | None], limit: float) -> int:
    """Count the runs from the start that fit; only the first one where a time is unknown."""
    if None in minutes:
        return 1
    whole = np.cumsum([each or 0.0 for each in minutes])
    return int((whole <= limit).sum())


def _minutes(
    config: AblationConfig, results: Results, name: str, otherwise: float | None
) -> float | None:
    """Estimate a run of a variant: of its own finished runs, of all, or as it was told."""
    own = [result for (variant, _), result in results.items() if variant == name]
    untimed = [r for (n, _), r in results.items() if config.variants[n].minutes is None]
    trained = config.variants[name].minutes
    if not own and trained is not None:
        beside = [r["seconds"] - r["training"]["seconds"] for r in untimed if "training" in r]
        return trained + (float(np.mean(beside)) / 60 if beside else 0.0)
    known = own or untimed
    return float(np.mean([r["seconds"] for r in known])) / 60 if known else otherwise
