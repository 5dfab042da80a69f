"""Retrieval: recall of a task in training, and of any model folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.downstream.task_evaluation import TaskEvaluation, register_evaluation
from evaluation.jobs import RetrievalJob
from evaluation.options import EvalOptions
from evaluation.results import Result
from evaluation.retrieval.retrieval import DIRECTIONS, evaluate_retrieval
from vlp.metrics import RECALL_AT
from vlp.tasks.retrieval.task import Retrieval


class RetrievalEvaluation(TaskEvaluation):
    """Recall at 1, 5 and 10 in both directions."""

    kind = "retrieval"
    title = "Image-text retrieval"
    columns = (
        *(f"{arrow} R@{k}" for arrow in ("image → text", "text → image") for k in RECALL_AT),
        *("image → text mean", "text → image mean", "both mean"),
    )
    job = RetrievalJob
    evaluate_loaded = staticmethod(evaluate_retrieval)

    def evaluate(
        self,
        task: Retrieval,
        shards: Sequence[str | Path],
        options: EvalOptions = EvalOptions(),
        **kwargs: Any,
    ) -> Result:
        """Compute recalls in both directions and their `mean`, re-ranked if the task re-ranks."""
        rerank = task.settings.rerank
        result = evaluate_retrieval(task.loaded, shards, options, rerank=rerank, **kwargs)
        stage = result.stages[-1]
        figures = {"mean": result.mean(stage)}
        for direction in DIRECTIONS:
            for k in RECALL_AT:
                figures[f"{direction} R@{k}"] = result.recall(stage, direction, k)
        return Result(
            kind=task.kind,
            counts={"items": result.counts["texts"]},
            shards=result.shards,
            figures=figures,
            predictions=result.predictions,
            skipped=result.skipped,
            notes=result.notes,
        )


register_evaluation(RetrievalEvaluation())
