"""GradCache (Gao et al. 2021, arXiv 2101.06983): passes in chunks of rows, to save memory.

Only one chunk has activations at a time. The paper computes features without a graph, then the
gradient of the loss with respect to them, then each chunk again with a graph. Activation
checkpointing of the chunks does the same in one ordinary backward pass, for every objective and
with the same dropout in both passes.
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


def chunk_slices(rows: int, size: int) -> Iterator[slice]:
    """Yield slices of `size` consecutive rows; the last may be shorter."""
    return (slice(start, start + size) for start in range(0, rows, size))


def select_rows(batch: Rows, rows: slice) -> Rows:
    """Return a named tuple with `rows` of every tensor; other fields stay as they are."""
    return batch._make(field[rows] if isinstance(field, Tensor) else field for field in batch)


def checkpoint_activations(function: Callable[[], Result]) -> Result:
    """Run a pass without storing its activations; the backward pass computes them again."""
    return checkpoint(function, use_reentrant=False)


def concatenate(chunks: Sequence[Any]) -> Any:
    """Concatenate named tuples of tensors, field by field, along the rows."""
    return type(chunks[0])(*(torch.cat(fields) for fields in zip(*chunks, strict=True)))


def run_in_chunks(objective: Objective, step: Step, size: int) -> dict[str, Term]:
    """Run an objective on chunks and sum its losses; statistics are means over chunks."""
    # The model's threshold is updated before the backward pass, which runs the chunks again: they
    # need the value of the forward pass.
    threshold = step.model.anchor_threshold.clone()
    outputs = [
        checkpoint_activations(partial(_run_chunk, objective, step, rows, threshold))
        for rows in chunk_slices(len(step.batch.valid), size)
    ]
    terms_by_chunk, statistics_by_chunk = zip(*outputs, strict=True)
    for name in statistics_by_chunk[0]:
        values = [statistics[name] for statistics in statistics_by_chunk]
        step.statistics[name] = torch.stack(values).mean()
    return {
        name: Term(_sum([terms[name].loss for terms in terms_by_chunk]), term.weight)
        for name, term in terms_by_chunk[0].items()
    }


def _sum(losses: list[Loss]) -> Loss:
    totals, counts = [loss.total for loss in losses], [loss.count for loss in losses]
    return Loss(sum(totals[1:], totals[0]), sum(counts[1:], counts[0]))


def _run_chunk(
    objective: Objective, step: Step, rows: slice, threshold: Tensor
) -> tuple[dict[str, Term], dict[str, Tensor]]:
    """Run an objective on `rows` of the inputs; return its terms without paths, and statistics."""
    teacher = step.teacher and step.teacher._replace(
        image=select_rows(step.teacher.image, rows), text=select_rows(step.teacher.text, rows)
    )
    chunk = replace(
        step,
        batch=select_rows(step.batch, rows),
        image=select_rows(step.image, rows),
        text=select_rows(step.text, rows),
        teacher=teacher,
        statistics={},
        image_kv=None,
    )
    current_threshold, step.model.anchor_threshold = step.model.anchor_threshold, threshold
    try:
        terms = objective(chunk)
        return {name: term._replace(paths=None) for name, term in terms.items()}, chunk.statistics
    finally:
        step.model.anchor_threshold = current_threshold
