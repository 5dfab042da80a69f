"""Passes in chunks of rows, one of which has activations at a time (GradCache).

Gao et al. 2021 (arXiv 2101.06983) compute features without a graph, the loss's gradient to them,
and each chunk again with a graph. Checkpoints around the chunks do that inside one ordinary
backward pass, for every objective and with the same dropout both times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vlp.objectives.loss import Loss
from vlp.tasks.pretraining.objectives import Objective, Step, Term

Rows = TypeVar("Rows", bound=NamedTuple)
Result = TypeVar("Result")


def chunks(rows: int, size: int) -> Iterator[slice]:
    """Yield slices of `size` consecutive rows; the last may be shorter."""
    return (slice(start, start + size) for start in range(0, rows, size))


def select(whole: Rows, rows: slice) -> Rows:
    """Return rows of every tensor in a named tuple; its other fields stay."""
    return whole._make(field[rows] if isinstance(field, Tensor) else field for field in whole)


def recomputed(function: Callable[[], Result]) -> Result:
    """Run a pass now, and once more in the backward pass; nothing of it is kept between."""
    result: Result = checkpoint(function, use_reentrant=False)
    return result


def joined(parts: Sequence[Any]) -> Any:
    """Concatenate the rows of equal named tuples."""
    return type(parts[0])(*(torch.cat(fields) for fields in zip(*parts, strict=True)))


def in_chunks(objective: Objective, step: Step, size: int) -> dict[str, Term]:
    """Run an objective on chunks and sum its losses; statistics are means over chunks."""
    threshold = step.model.anchor_threshold.clone()  # it moves before the backward pass
    parts = chunks(len(step.batch.valid), size)
    outcomes = [recomputed(partial(_run, objective, step, rows, threshold)) for rows in parts]
    terms = [terms for terms, _ in outcomes]
    for name in outcomes[0][1]:
        values = [statistics[name] for _, statistics in outcomes]
        step.statistics[name] = torch.stack(values).mean()
    return {
        name: Term(_sum([part[name].loss for part in terms]), term.weight)
        for name, term in terms[0].items()
    }


def _sum(losses: list[Loss]) -> Loss:
    totals, counts = [loss.total for loss in losses], [loss.count for loss in losses]
    return Loss(sum(totals[1:], totals[0]), sum(counts[1:], counts[0]))


def _run(
    objective: Objective, step: Step, rows: slice, threshold: Tensor
) -> tuple[dict[str, Term], dict[str, Tensor]]:
    teacher = step.teacher and step.teacher._replace(
        image=select(step.teacher.image, rows), text=select(step.teacher.text, rows)
    )
    part = replace(
        step,
        batch=select(step.batch, rows),
        image=select(step.image, rows),
        text=select(step.text, rows),
        teacher=teacher,
        statistics={},
        image_kv=None,
    )
    moved, step.model.anchor_threshold = step.model.anchor_threshold, threshold
    try:
        terms = objective(part)
        return {name: t._replace(anchors=None) for name, t in terms.items()}, part.statistics
    finally:
        step.model.anchor_threshold = moved
