"""Pair classification: accuracy on SNLI-VE, NLVR2 (with its consistency) and NLVR v1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from evaluation.downstream.submissions import Submission, write_nlvr2, write_snli_ve
from evaluation.downstream.task_evaluation import (
    PageAction,
    Row,
    Scored,
    TaskEvaluation,
    register_evaluation,
    sentence_of,
)
from evaluation.work_sharding import clustered_figures, set_scores
from vlp.data.downstream.dataset import cut_panels
from vlp.data.shards.shard_reader import Item
from vlp.precision import require_finite
from vlp.tasks.pair_classification.data import PairBatch, PairExample
from vlp.tasks.pair_classification.task import Nlvr2Config, PairClassification


class PairEvaluation(TaskEvaluation):
    """Share of right answers: `accuracy`, per class, and `consistency` of NLVR2.

    Consistency is the share of sentences with right answers for all their image pairs. Chance is
    the share of the most frequent class.
    """

    text_field = "text"
    action = PageAction("Judge", "judge", "Judge", "Judgement", "Hypothesis or statement")

    def __init__(self, kind: str, title: str, submission: Submission | None = None) -> None:
        self.kind, self.title, self.submission = kind, title, submission

    def row(
        self, task: PairClassification, item: Item, example: PairExample, prediction: str
    ) -> Row:
        """Return `key`, annotated ids, `text`, `prediction`, `label` and `image`."""
        extra, classes = item.raw.annotation.model_extra or {}, task.config.classes
        ids: Row = {name: extra[name] for name in ("identifier", "pairID") if name in extra}
        return {
            "key": item.raw.key,
            **ids,
            "text": example.text,
            "prediction": prediction,
            "label": None if example.label is None else classes[example.label],
            "image": item.raw.image_name,
        }

    def score(
        self, task: PairClassification, rows: Sequence[Row], resamples: int, **options: Any
    ) -> Scored:
        """Compute accuracy, overall and by class, and for NLVR2 consistency."""
        classes = task.config.classes
        labels = np.array([classes.index(row["label"]) for row in rows])
        correct = np.array([row["label"] == row["prediction"] for row in rows])
        masks = {name: labels == label for label, name in enumerate(classes)}
        # A class without samples has no accuracy.
        names = [name for name in classes if masks[name].any()]
        values = {"accuracy": correct, **dict.fromkeys(names, correct)}
        class_counts = np.bincount(labels)
        chance = float(class_counts.max() / len(labels))
        images = [row["image"] for row in rows]
        figures = clustered_figures(values, images, {"accuracy": chance}, resamples, masks)
        set_scores(rows, values, masks)
        notes = [f"Chance of accuracy: always `{classes[int(class_counts.argmax())]}`."]
        if isinstance(task.config, Nlvr2Config):
            # A sentence recurs with several image pairs; one wrong answer makes it inconsistent.
            sentences, index = np.unique([sentence_of(row) for row in rows], return_inverse=True)
            is_consistent = np.bincount(index, ~correct) == 0
            figures |= clustered_figures(
                {"consistency": is_consistent}, sentences.tolist(), {}, resamples
            )
            notes.append("Consistency: share of sentences with right answers for all image pairs.")
        return Scored(figures, tuple(notes))

    def image_count(self, task: PairClassification) -> tuple[int, int]:
        """Return the number of images of a text, and of panels of each image."""
        if isinstance(task.config, Nlvr2Config):
            return task.config.images, task.config.panels
        return task.config.num_images, 1

    def predict_item(
        self,
        task: PairClassification,
        images: Sequence[Image.Image],
        text: str,
        device: torch.device,
    ) -> list[tuple[str, float]]:
        """Return all classes with probabilities; images are cut into panels here."""
        _, panel_count = self.image_count(task)
        panel_images = [panel for image in images for panel in cut_panels(image, panel_count)]
        pixels = task.prepare(panel_images, text, 0, None)[None]
        valid = torch.ones(1, dtype=torch.bool)
        # `logits` does not read the label.
        batch = PairBatch(pixels, *task.text([text]), torch.tensor([-1]), valid).to(device)
        probabilities = require_finite(task.logits(batch).float()).softmax(-1)[0].tolist()
        return sorted(zip(task.config.classes, probabilities), key=lambda pair: -pair[1])


for _evaluation in (
    PairEvaluation(
        "snli_ve",
        "Visual entailment",
        Submission("pairID", write_snli_ve, lambda row: {**row, "label": row["prediction"]}),
    ),
    PairEvaluation(
        "nlvr2",
        "Visual reasoning (statements)",
        Submission(
            "identifier", write_nlvr2, lambda row: {**row, "label": row["prediction"] == "True"}
        ),
    ),
    PairEvaluation("nlvr2_assignment", "Text assignment"),
):
    register_evaluation(_evaluation)
