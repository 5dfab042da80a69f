"""Counters of a run: its progress, outcomes of its steps, and sums between two log lines."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from vlp import distributed
from vlp.data.shards.remote import retries
from vlp.data.stream.batch import Slots
from vlp.tasks.task import StepOutput
from vlp.training.engines.engine import Update

# Bad samples of one kind whose locations the report has.
_MAX_EXAMPLES = 20


@dataclass
class Progress:
    """Counters of a run: all state of a resume but weights, optimiser and the task's extra state.

    step: optimiser steps with skipped steps. samples: consumed by all ranks over all epochs, which
    fixes the position in the data; trained_samples: valid samples of these. seconds: of training.
    skipped: counts of bad samples by kind; examples: locations of some. non_finite: skipped steps;
    non_finite_row: skipped steps since the last applied step. resumed: steps of resumption. looked:
    last validated step. metric, validation: name of the deciding metric and identity of its data.
    best, best_step, best_figures: its best value, the step, and all metrics of that step.
    looks_since: validations after that.
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


class Outcome(NamedTuple):
    """Result of an optimiser step, counted from 1: outputs of its micro-steps, and the update."""

    step: int
    outputs: list[StepOutput]
    update: Update


def copy_to_cpu(outcomes: list[Outcome]) -> list[Outcome]:
    """Return outcomes with all CUDA scalars copied to the CPU."""
    leaves, structure = tree_flatten(outcomes)
    indices = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_cuda]
    if indices:
        # One copy waits for the device once.
        numbers = torch.stack([leaves[index].float() for index in indices]).cpu()
        for index, number in zip(indices, numbers):
            leaves[index] = number
    result: list[Outcome] = tree_unflatten(leaves, structure)
    return result


class Meter:
    """Sums of one rank between two log lines, added up without waiting for the device."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        # Counts of this rank that are not in `progress` yet.
        self._trained = 0
        self._skipped: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}
        self._counted_until = time.perf_counter()
        self._open()

    def _open(self) -> None:
        self._start = time.perf_counter()
        self._trained_before = self._progress.trained_samples
        self._waited = 0.0
        self._retries = retries().value
        self._sums: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()
        self._norms: list[float] = []
        self._scale: float | None = None

    def add_batch(self, batch: Slots, waited: float) -> None:
        """Count a batch that took `waited` seconds to arrive."""
        self._waited += waited
        self._trained += int(batch.valid.sum())
        for skip in batch.skipped:
            self._skipped[skip.kind] += 1
            self._examples.setdefault(skip.kind, []).append(skip.where)

    def exclude(self, seconds: float) -> None:
        """Exclude seconds without training from throughput and training time."""
        self._start += seconds
        self._counted_until += seconds

    def add_step(self, outputs: list[StepOutput], update: Update) -> None:
        """Add the losses and statistics of an optimiser step that was applied."""
        self._norms.append(float(update.gradient_norm))
        self._scale = update.loss_scale
        for output in outputs:
            tensors = {"loss/total": output.loss}
            tensors |= {f"loss/{name}": value for name, value in output.losses.items()}
            tensors |= {f"statistics/{name}": value for name, value in output.statistics.items()}
            for name, value in tensors.items():
                value = value.detach().to(output.loss.device, torch.float32)
                self._sums[name] = self._sums[name] + value if name in self._sums else value
                self._counts[name] += 1

    def reduce_counts(self) -> None:
        """Add the counts of all ranks to `progress`; collective."""
        ranks = distributed.gather_to_all((self._trained, self._skipped, self._examples))
        progress = self._progress
        for trained, skipped, examples in ranks:
            progress.trained_samples += trained
            for kind, count in skipped.items():
                progress.skipped[kind] = progress.skipped.get(kind, 0) + count
                stored = progress.examples.setdefault(kind, [])
                stored.extend(examples[kind][: _MAX_EXAMPLES - len(stored)])
        now = time.perf_counter()
        progress.seconds += now - self._counted_until
        self._counted_until = now
        self._trained, self._skipped, self._examples = 0, Counter(), {}

    def flush(self) -> dict[str, Any]:
        """Return means over ranks and steps since the last call; collective.

        Losses and statistics are absent when every step was skipped.
        """
        self.reduce_counts()
        seconds = max(time.perf_counter() - self._start, 1e-9)
        means = [value / self._counts[name] for name, value in self._sums.items()]
        # One copy waits for the device once.
        by_name = dict(zip(self._sums, torch.stack(means).tolist() if means else []))
        ranks = distributed.gather_to_all((set(by_name), retries().value - self._retries))
        names = sorted(set[str]().union(*(presence for presence, _ in ranks)))
        presence = [float(name in by_name) for name in names]
        local = [*(by_name.get(name, 0.0) for name in names), *presence, self._waited / seconds]
        # A mean is over the ranks that have the value: a rank without samples may lack some.
        *averages, waiting = distributed.mean_over_ranks(torch.tensor(local)).tolist()
        trained = self._progress.trained_samples - self._trained_before
        record: dict[str, Any] = {
            name: total / share
            for name, total, share in zip(names, averages, averages[len(names) :])
        }
        if self._norms:
            record["gradient_norm"] = sum(self._norms) / len(self._norms)
        if self._scale is not None:
            record["loss_scale"] = self._scale
        record |= {"samples_per_second": trained / seconds, "data_wait_share": waiting}
        record["store_retries"] = sum(count for _, count in ranks)
        self._open()
        return record
