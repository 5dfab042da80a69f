"""Recall of a retrieval task in training, as the figures that choose its best model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.downstream.result import TaskResult
from evaluation.retrieval.retrieval import DIRECTIONS, evaluate_retrieval
from vlp.tasks.downstream.retrieval import Retrieval


def evaluate(
    task: Retrieval, shards: Sequence[str | Path], *, batch: int = 64, **options: Any
) -> TaskResult:
    """`mean` of all recalls, then each, after re-ranking where the task asks for it.

    Raises:
        EvaluationError: there is nothing to evaluate.
        ConfigError: a shard folder cannot be read.
    """
    rerank = task.settings.rerank
    found = evaluate_retrieval(task.loaded, shards, rerank=rerank, batch=batch, **options)
    stage = found.stages[-1]
    figures = {"mean": found.mean(stage)}
    for direction in DIRECTIONS:
        for k in (1, 5, 10):
            figures[f"{direction} R@{k}"] = found.recall(stage, direction, k)
    return TaskResult(
        kind=task.kind,
        items=found.texts,
        shards=found.shards,
        figures=figures,
        predictions=found.predictions,
        skipped=found.skipped,
    )
