"""Where expressions point in training, as the figures that choose the best model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.downstream.result import TaskResult
from evaluation.grounding.grounding import evaluate_grounding
from vlp.tasks.downstream.grounding import Grounding


def evaluate(task: Grounding, shards: Sequence[str | Path], **options: Any) -> TaskResult:
    """`pointing`, and the choice among proposals where there are some.

    Raises:
        EvaluationError: no expression can be used, or its map cannot be made as configured.
        ConfigError: a shard folder cannot be read.
    """
    made = task.settings
    return evaluate_grounding(
        task.loaded, shards, by=made.by, layer=made.layer, head=made.head, **options
    )
