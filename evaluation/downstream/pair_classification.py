"""Accuracy on SNLI-VE, NLVR2 (with its consistency) and NLVR v1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from evaluation.core.eval_mode import evaluating
from evaluation.core.feature_cache import precision_context
from evaluation.downstream.blocks import EvaluatedItems, image_name, judge_blocks
from evaluation.downstream.result import TaskResult, clustered_figures, judgeable, keep_scores
from vlp.data.downstream.items import Item
from vlp.data.downstream.pair_classification import PairExample
from vlp.tasks.downstream.pair_classification import (
    Nlvr2AssignmentConfig,
    Nlvr2Config,
    PairClassification,
)


def evaluate(
    task: PairClassification,
    shards: Sequence[str | Path],
    *,
    limit: int | None = None,
    batch: int = 64,
    device: torch.device | str | None = None,
    precision: Literal["float32", "bf16"] = "float32",
    resamples: int = 1000,
    progress: bool = False,
) -> TaskResult:
    """Share of right answers: `accuracy`, of each class, and `consistency` of statements.

    Consistency is NLVR2's: the share of sentences that are judged rightly for all their pairs of
    images. The chance of accuracy is the share of the most frequent class. Samples without a
    label, as in a test set, are predicted and not counted.

    Raises:
        EvaluationError: no sample can be used, or none has a label.
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
    )
    folders, classes = tuple(map(str, shards)), task.config.classes
    labelled = judgeable(rows, "label", folders, "no sample has a label")
    truth = np.array([classes.index(row["label"]) for row in labelled])
    right = np.array([row["label"] == row["prediction"] for row in labelled])
    values = {"accuracy": right, **dict.fromkeys(classes, right)}
    counted = {name: truth == number for number, name in enumerate(classes)}
    missing = [name for name in classes if not counted[name].any()]
    for name in missing:
        del values[name]
    chance = float(np.bincount(truth).max() / len(truth))
    clusters = [row["image"] for row in labelled]
    figures = clustered_figures(values, clusters, {"accuracy": chance}, resamples, counted)
    keep_scores(labelled, values, counted)
    notes = [f"Chance of accuracy: always `{classes[int(np.bincount(truth).argmax())]}`."]
    if isinstance(task.config, Nlvr2Config):
        sentences = [str(row["text"]) for row in labelled]
        known = sorted(set(sentences))
        numbers = {sentence: number for number, sentence in enumerate(known)}
        wrong = np.bincount([numbers[text] for text in sentences], ~right, len(known)) > 0
        figures |= clustered_figures({"consistency": ~wrong}, known, {}, resamples)
        notes.append("Consistency: sentences that are judged rightly every time, over sentences.")
    return TaskResult(
        kind=task.kind,
        items=len(rows),
        shards=folders,
        figures=figures,
        predictions=rows,
        skipped=skipped,
        notes=tuple(notes),
    )


def predictions(
    task: PairClassification,
    shards: Sequence[str | Path],
    *,
    limit: int | None = None,
    batch: int = 64,
    device: torch.device | str | None = None,
    precision: Literal["float32", "bf16"] = "float32",
    progress: bool = False,
) -> EvaluatedItems:
    """A class for every sample, labelled or not; arguments and errors as in `evaluate`.

    Rows hold `key`, the ids that there are, `text`, `prediction`, `label` (None without one) and
    `image`.
    """
    claims = task.dataset(shards, limit)

    def judge(made: Sequence[tuple[Item, PairExample]]) -> list[dict[str, Any]]:
        inputs = claims.collate([claim for _, claim in made]).to(place)
        with torch.no_grad(), precision_context(place, precision):
            best = task.logits(inputs).float().argmax(-1).tolist()
        return [_row(item, claim, task, guess) for (item, claim), guess in zip(made, best)]

    with evaluating(task, device) as place:
        return judge_blocks(claims.items, batch, claims.make, judge, progress)


def _row(item: Item, claim: PairExample, task: PairClassification, guess: int) -> dict[str, Any]:
    annotation, classes = item.raw.annotation, task.config.classes
    said = (
        "\n".join(annotation.captions or [annotation.caption or ""])
        if isinstance(task.config, Nlvr2AssignmentConfig)
        else annotation.statement or annotation.hypothesis
    )
    extra = annotation.model_extra or {}
    ids: dict[str, Any] = {name: extra[name] for name in ("identifier", "pairID") if name in extra}
    return {
        "key": item.raw.key,
        **ids,
        "text": said,
        "prediction": classes[guess],
        "label": None if claim.label is None else classes[claim.label],
        "image": image_name(item),
    }
