"""Visual question answering: VQA accuracy, overall and by type of question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from evaluation.downstream.submissions import Submission, write_vqa
from evaluation.downstream.task_evaluation import (
    PageAction,
    Row,
    Scored,
    TaskEvaluation,
    register_evaluation,
)
from evaluation.jobs import VqaJob
from evaluation.work_sharding import clustered_figures, set_scores
from vlp.data.shards.shard_reader import Item
from vlp.tasks.vqa.data import VqaBatch, VqaExample
from vlp.tasks.vqa.metrics import Version, normalise_answer, vqa_accuracy
from vlp.tasks.vqa.task import Predict, Vqa


class VqaEvaluation(TaskEvaluation):
    """VQA `accuracy`, overall and by question type, and `exact`.

    Exact: share of predictions equal to a most frequent human answer, both normalised. Options:
    `predict` (`rank` or `generate`) and `version` of the evaluator, by default the task's.
    """

    kind = "vqa"
    title = "Visual question answering"
    truth, no_truth = "answers", "no question has an answer"
    hidden = ("answers", "types")
    text_field = "question"
    option_names = ("predict", "version")
    job = VqaJob
    submission = Submission("question_id", write_vqa)
    action = PageAction("Ask", "answer", "Ask", "Answer", "Question")

    def row(self, task: Vqa, item: Item, example: VqaExample, prediction: str) -> Row:
        """Return ids, `question`, `answer`, human `answers`, `types` and `image`."""
        return {
            "key": item.raw.key,
            "question_id": example.question.id,
            "question": example.question.question,
            "answer": prediction,
            "answers": dict(example.answers),
            "types": dict(example.types),
            "image": item.raw.image_name,
        }

    def predict(self, task: Vqa, batch: VqaBatch, **options: Any) -> list[str]:
        """Answer the questions of a batch."""
        return task.predict(batch, options.get("predict"))

    def score(self, task: Vqa, rows: Sequence[Row], resamples: int, **options: Any) -> Scored:
        """Compute the figures; by type they are called `answer: TYPE` and `question: TYPE`."""
        version = options.get("version") or task.config.accuracy
        accuracy = np.array([_accuracy(row["answer"], row, version) for row in rows])
        # Chance: the most frequent human answer to every question.
        frequent = _most_frequent(rows)
        chance = float(np.mean([_accuracy(frequent, row, version) for row in rows]))
        values = {"accuracy": accuracy, "exact": np.array([_exact(row) for row in rows])}
        masks = _type_masks([row["types"] for row in rows])
        values |= dict.fromkeys(masks, accuracy)
        set_scores(rows, values, masks)
        images = [row["image"] for row in rows]
        return Scored(
            clustered_figures(values, images, {"accuracy": chance}, resamples, masks),
            (
                f"Accuracy as the evaluator {version!r} counts; its chance: always `{frequent}`.",
                "Exact: equal to a most frequent human answer, both normalised.",
                f"Answers by: {_decoding(task, options.get('predict'))}.",
            ),
        )

    def predict_item(
        self, task: Vqa, images: Sequence[Image.Image], text: str, device: torch.device
    ) -> list[tuple[str, float]]:
        """Return [(answer, probability)], a product over its word pieces and end token."""
        # `remember` reads images and question alone: there are no answers.
        empty = torch.zeros(0, dtype=torch.int64)
        batch = VqaBatch(
            task.prepare(images, text, 0, None),
            *task.text([text]),
            answer_ids=empty.view(0, 0),
            question_index=empty,
            answer_weights=torch.zeros(0),
            valid=torch.ones(1, dtype=torch.bool),
        ).to(device)
        memory = task.remember(batch)
        answer = task.answer(memory)[0]
        return [(answer, task.text_probability(memory, task.answer_text, answer))]


def _accuracy(prediction: str, row: Row, version: Version) -> float:
    return vqa_accuracy(prediction, row["answers"].items(), version)


def _exact(row: Row) -> bool:
    answers: Mapping[str, int] = row["answers"]
    top = max(answers.values())
    frequent = {normalise_answer(answer) for answer, count in answers.items() if count == top}
    return normalise_answer(row["answer"]) in frequent


def _most_frequent(rows: Sequence[Row]) -> str:
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row["answers"])
    # Ties in alphabetical order, so that the order of shards changes no figure.
    return min(counts, key=lambda answer: (-counts[answer], answer))


def _type_masks(types: Sequence[Mapping[str, str]]) -> dict[str, NDArray[np.bool_]]:
    """Return a mask (questions,) for each type, by the figure's name."""
    groups = sorted({part for row_types in types for part in row_types.items()})
    return {
        f"{division}: {kind}": np.array([row_types.get(division) == kind for row_types in types])
        for division, kind in groups
    }


def _decoding(task: Vqa, predict: Predict | None) -> str:
    config = task.config
    if (predict or config.predict) == "generate":
        return f"writing, {config.beams} beams"
    pool = "all that can win" if config.candidates is None else f"{config.candidates} candidates"
    return f"ranking {len(task.answers)} answers, {pool}"


register_evaluation(VqaEvaluation())
