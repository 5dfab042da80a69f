"""Fine-tuned models on the data of their benchmark; `registry` has the evaluation of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.downstream.registry import get_evaluation
from evaluation.options import EvalOptions
from evaluation.results import Result
from vlp.tasks.downstream.task import Downstream
from vlp.tasks.retrieval.task import PairsTask


def evaluate_task(
    task: Downstream | PairsTask,
    shards: Sequence[str | Path],
    options: EvalOptions = EvalOptions(),
    **kwargs: Any,
) -> Result:
    """Evaluate a task on shards; the same for any number of ranks."""
    return get_evaluation(task.kind).evaluate(task, shards, options, **kwargs)
