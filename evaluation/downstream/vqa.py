"""VQA accuracy of a question-answering model, overall and by type of question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from evaluation.core.eval_mode import evaluating
from evaluation.core.feature_cache import precision_context
from evaluation.downstream.blocks import EvaluatedItems, image_name, judge_blocks
from evaluation.downstream.result import TaskResult, clustered_figures, judgeable, keep_scores
from vlp.data.downstream.items import Item
from vlp.data.downstream.vqa import VqaExample
from vlp.metrics.vqa import Version, normalise_answer, vqa_accuracy
from vlp.tasks.downstream.vqa import Predict, Vqa

Row = dict[str, Any]

SAID = ("key", "question_id", "question", "answer", "image", "scores")


def evaluate(
    task: Vqa,
    shards: Sequence[str | Path],
    *,
    limit: int | None = None,
    batch: int = 64,
    device: torch.device | str | None = None,
    precision: Literal["float32", "bf16"] = "float32",
    resamples: int = 1000,
    progress: bool = False,
    predict: Predict | None = None,
    version: Version | None = None,
) -> TaskResult:
    """`accuracy` as VQA counts it, `exact`, and accuracy by the types that the questions name.

    Exact is the share of predictions that equal an answer that most people gave, both normalised.
    The chance of accuracy is that of always giving the most frequent answer. Questions without
    answers, as in a test set, are answered and not counted.

    Args:
        task: from `load_task`, or in training.
        shards: shard folders, evaluated as one set.
        limit: only the first so many questions.
        batch: questions at once.
        device: where to compute; None is this rank's GPU, or the CPU.
        precision: of the model.
        resamples: bootstrap draws over images.
        progress: a bar on the first rank.
        predict: `rank` or `generate`; None is as the task is configured.
        version: the evaluator, likewise.

    Raises:
        EvaluationError: no question can be used, or none has an answer.
        ConfigError: a shard folder cannot be read.
    """
    rows, skipped = predictions(
        task,
        shards,
        limit=limit,
        batch=batch,
        device=device,
        precision=precision,
        progress=progress,
        predict=predict,
    )
    folders, version = tuple(map(str, shards)), version or task.config.accuracy
    answered = judgeable(rows, "answers", folders, "no question has an answer")
    values = np.array([_accuracy(row["answer"], row, version) for row in answered])
    frequent = _most_frequent(answered)
    chance = float(np.mean([_accuracy(frequent, row, version) for row in answered]))
    figures = {"accuracy": values, "exact": np.array([_exact(row) for row in answered])}
    counted = _by_type([row["types"] for row in answered])
    figures |= dict.fromkeys(counted, values)
    keep_scores(answered, figures, counted)
    return TaskResult(
        kind=task.config.kind,
        items=len(rows),
        shards=folders,
        figures=clustered_figures(
            figures,
            [row["image"] for row in answered],
            {"accuracy": chance},
            resamples,
            counted,
        ),
        predictions=[{name: row[name] for name in SAID if name in row} for row in rows],
        skipped=skipped,
        notes=(
            f"Accuracy as the evaluator {version!r} counts; its chance: always `{frequent}`.",
            "Exact: equal to an answer that most people gave, both normalised.",
            f"Answers by: {_way(task, predict)}.",
        ),
    )


def predictions(
    task: Vqa,
    shards: Sequence[str | Path],
    *,
    limit: int | None = None,
    batch: int = 64,
    device: torch.device | str | None = None,
    precision: Literal["float32", "bf16"] = "float32",
    progress: bool = False,
    predict: Predict | None = None,
) -> EvaluatedItems:
    """An answer to every question, answered by people or not; arguments as in `evaluate`.

    Rows hold what is in `SAID` but `scores`, and people's `answers` and the question's `types`.
    """
    questions = task.dataset(shards, limit)

    def judge(made: Sequence[tuple[Item, VqaExample]]) -> list[Row]:
        inputs = questions.collate([asked for _, asked in made]).to(place)
        with precision_context(place, precision):
            said = task.predict(inputs, predict)
        return [_row(item, asked, answer) for (item, asked), answer in zip(made, said)]

    with evaluating(task, device) as place:
        return judge_blocks(questions.items, batch, questions.make, judge, progress)


def _row(item: Item, asked: VqaExample, answer: str) -> Row:
    return {
        "key": item.raw.key,
        "question_id": asked.question.id,
        "question": asked.question.question,
        "answer": answer,
        "answers": dict(asked.answers),
        "types": dict(asked.types),
        "image": image_name(item),
    }


def _accuracy(prediction: str, row: Row, version: Version) -> float:
    return vqa_accuracy(prediction, row["answers"].items(), version)


def _exact(row: Row) -> bool:
    answers: Mapping[str, int] = row["answers"]
    most = max(answers.values())
    best = {normalise_answer(answer) for answer, count in answers.items() if count == most}
    return normalise_answer(row["answer"]) in best


def _most_frequent(rows: Sequence[Row]) -> str:
    said: Counter[str] = Counter()
    for row in rows:
        said.update(row["answers"])
    return min(said, key=lambda answer: (-said[answer], answer))


def _by_type(types: Sequence[Mapping[str, str]]) -> dict[str, NDArray[np.bool_]]:
    """The questions of each type, by the figure's name."""
    named = sorted({part for own in types for part in own.items()})
    return {
        f"{division}: {kind}": np.array([own.get(division) == kind for own in types])
        for division, kind in named
    }


def _way(task: Vqa, predict: Predict | None) -> str:
    config = task.config
    if (predict or config.predict) == "generate":
        return f"writing, {config.beams} beams"
    tried = "all that can win" if config.candidates is None else f"{config.candidates} candidates"
    return f"ranking {len(task.answers)} answers, {tried}"
