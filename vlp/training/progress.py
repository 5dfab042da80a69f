"""Progress of a run, outcomes of its optimiser steps, and means between two log lines."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from vlp import distributed
from vlp.data.shards.remote import retries
from vlp.data.stream.batch import RankBatch
from vlp.tasks.task import StepOutput
from vlp.training.engines.engine import Update

# Bad samples of each kind whose locations the report lists.
_MAX_EXAMPLES = 20


@dataclass
class Progress:
    """State of a run in a checkpoint's `state.json`, where an alias is the field's key.

    Attributes:
        step: optimiser steps, with skipped ones.
        samples: samples consumed by all ranks in all epochs, bad ones too; position in the data.
        trained_samples: samples without the bad ones.
        seconds: training time of all starts.
        skipped: number of bad samples by kind.
        skipped_examples: locations of the first bad samples, by kind.
        non_finite: skipped steps; non_finite_in_a_row: skipped steps since the last applied one.
        resume_steps: the step of each resume.
        validated_step: the last validated step.
        metric: name of the metric that decides which model is the best.
        validation_data: identity of the validation data.
        best, best_step, best_metrics: best value of `metric`, its step, and all metrics there.
        validations_since_best: number of validations after `best_step`.
    """

    step: int = 0
    samples: int = 0
    trained_samples: int = 0
    seconds: float = 0.0
    skipped: dict[str, int] = field(default_factory=dict)
    skipped_examples: Annotated[dict[str, list[str]], Field(alias="examples")] = field(
        default_factory=dict
    )
    non_finite: int = 0
    non_finite_in_a_row: Annotated[int, Field(alias="non_finite_row")] = 0
    resume_steps: Annotated[list[int], Field(alias="resumed")] = field(default_factory=list)
    validated_step: Annotated[int, Field(alias="looked")] = 0
    metric: str | None = None
    validation_data: Annotated[str, Field(alias="validation")] = ""
    best: float | None = None
    best_step: int | None = None
    best_metrics: Annotated[dict[str, float], Field(alias="best_figures")] = field(
        default_factory=dict
    )
    validations_since_best: Annotated[int, Field(alias="looks_since")] = 0


class Outcome(NamedTuple):
    """Result of optimiser step `step` (from 1): outputs of its micro-steps, and the update."""

    step: int
    outputs: list[StepOutput]
    update: Update


def copy_to_cpu(outcomes: list[Outcome]) -> list[Outcome]:
    """Return outcomes with all CUDA scalars copied to the CPU, as float32."""
    leaves, structure = tree_flatten(outcomes)
    indices = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_cuda]
    if indices:
        # One copy waits for the device once.
        scalars = torch.stack([leaves[index].float() for index in indices]).cpu()
        for index, scalar in zip(indices, scalars):
            leaves[index] = scalar
    return tree_unflatten(leaves, structure)


class Meter:
    """Means of losses and statistics between two log lines, and counts of samples for `progress`.

    Sums stay on the device until `flush`.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        # Counts of this rank that are not in `progress` yet.
        self._trained_samples = 0
        self._skipped: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}
        # `progress.seconds` covers the training up to this time.
        self._timed_until = time.perf_counter()
        self._reset()

    def _reset(self) -> None:
        self._start = time.perf_counter()
        self._start_samples = self._progress.trained_samples
        self._wait_seconds = 0.0
        self._retries = retries().value
        self._sums: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()
        self._norms: list[float] = []
        self._scale: float | None = None

    def add_batch(self, batch: RankBatch, wait_seconds: float) -> None:
        """Count a batch that took `wait_seconds` to arrive."""
        self._wait_seconds += wait_seconds
        self._trained_samples += int(batch.valid.sum())
        for sample in batch.skipped:
            self._skipped[sample.kind] += 1
            self._examples.setdefault(sample.kind, []).append(sample.where)

    def exclude(self, seconds: float) -> None:
        """Exclude seconds without training from throughput and training time."""
        self._start += seconds
        self._timed_until += seconds

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
        counts = (self._trained_samples, self._skipped, self._examples)
        progress = self._progress
        for trained_samples, skipped, examples in distributed.all_gather_object(counts):
            progress.trained_samples += trained_samples
            for kind, count in skipped.items():
                progress.skipped[kind] = progress.skipped.get(kind, 0) + count
                earlier = progress.skipped_examples.setdefault(kind, [])
                earlier.extend(examples[kind][: _MAX_EXAMPLES - len(earlier)])
        now = time.perf_counter()
        progress.seconds += now - self._timed_until
        self._timed_until = now
        self._trained_samples, self._skipped, self._examples = 0, Counter(), {}

    def flush(self) -> dict[str, Any]:
        """Return a log record of the steps since the last call; collective.

        It has the means of losses and statistics over ranks and micro-steps (of applied steps),
        gradient norm, loss scale, samples/s by this rank's clock, share of time that data took, and
        retries of all ranks.
        """
        self.reduce_counts()
        seconds = max(time.perf_counter() - self._start, 1e-9)
        means = [total / self._counts[name] for name, total in self._sums.items()]
        # One copy waits for the device once.
        local_means = dict(zip(self._sums, torch.stack(means).tolist() if means else []))
        ranks = distributed.all_gather_object((set(local_means), retries().value - self._retries))
        names = sorted(set[str]().union(*(local_names for local_names, _ in ranks)))
        # A rank without samples may lack a value. The mean over the ranks that have it is the mean
        # over all ranks, with 0 for a missing value, divided by the share of ranks that have it.
        values = [local_means.get(name, 0.0) for name in names]
        presence = [float(name in local_means) for name in names]
        local = torch.tensor([*values, *presence, self._wait_seconds / seconds])
        *averages, wait_share = distributed.mean_over_ranks(local).tolist()
        averages, shares = averages[: len(names)], averages[len(names) :]
        record: dict[str, Any] = {
            name: average / share for name, average, share in zip(names, averages, shares)
        }
        if self._norms:
            record["gradient_norm"] = sum(self._norms) / len(self._norms)
        if self._scale is not None:
            record["loss_scale"] = self._scale
        trained_samples = self._progress.trained_samples - self._start_samples
        record["samples_per_second"] = trained_samples / seconds
        record["data_wait_share"] = wait_share
        record["store_retries"] = sum(count for _, count in ranks)
        self._reset()
        return record
