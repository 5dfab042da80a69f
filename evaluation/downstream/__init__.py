"""Fine-tuned models on the data of their benchmark.

Each kind of task has a module here with
`evaluate(task, shards, *, limit, batch, device, precision, resamples, progress) -> TaskResult`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from evaluation.downstream.result import TaskResult
from vlp.tasks.downstream.registry import task_module
from vlp.tasks.downstream.retrieval import PairsTask
from vlp.tasks.downstream.task import Downstream


def evaluate_task(
    task: Downstream | PairsTask, shards: Sequence[str | Path], **options: Any
) -> TaskResult:
    """Judge a task on shards; the same for any number of ranks.

    Args:
        task: as `vlp.tasks.downstream.task.load_task` gives it, or one in training.
        shards: shard folders, evaluated as one set.
        options: of the kind's `evaluate`: limit, batch, device, precision, resamples, progress.

    Raises:
        EvaluationError: there is nothing to evaluate.
        ConfigError: a shard folder cannot be read.
    """
    module = import_module(f"evaluation.downstream.{task_module(task.kind)}")
    result: TaskResult = module.evaluate(task, shards, **options)
    return result
