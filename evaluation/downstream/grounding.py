"""Visual grounding: pointing accuracy of a task in training, and of any model folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.downstream.submissions import Submission, write_refcoco
from evaluation.downstream.task_evaluation import TaskEvaluation, register_evaluation
from evaluation.grounding.grounding import evaluate_grounding
from evaluation.jobs import GroundingJob
from evaluation.options import EvalOptions
from evaluation.results import Result
from vlp.tasks.grounding.task import Grounding


class GroundingEvaluation(TaskEvaluation):
    """Pointing accuracy, and with proposals the accuracy of the selected box."""

    kind = "grounding"
    title = "Visual grounding"
    text_field = "text"
    job = GroundingJob
    evaluate_loaded = staticmethod(evaluate_grounding)
    submission = Submission(
        "box",
        write_refcoco,
        lambda row: {"sent_id": row["id"], "box": row["box"]},
        "proposals to choose from (`vlp data refcoco --detections`)",
    )

    def evaluate(
        self,
        task: Grounding,
        shards: Sequence[str | Path],
        options: EvalOptions = EvalOptions(),
        **kwargs: Any,
    ) -> Result:
        """Evaluate with the kind of map in the task's settings."""
        by, layer, head = task.settings.by, task.settings.layer, task.settings.head
        return evaluate_grounding(
            task.loaded, shards, options, by=by, layer=layer, head=head, **kwargs
        )


register_evaluation(GroundingEvaluation())
