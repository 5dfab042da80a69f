"""Prediction for image files and a text, with probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import vlp
from evaluation.core.encode_one import encode_one
from evaluation.core.eval_mode import evaluating, inference
from evaluation.core.samples import EvaluationError, said_in_one_line
from evaluation.core.untrained_match import NEVER_MATCHED
from evaluation.downstream.predict import has_task
from evaluation.downstream.registry import get_evaluation
from evaluation.probes.anchor_maps import read_pair
from vlp.config import Precision
from vlp.models.features import ImageFeatures
from vlp.models.folder import Loaded
from vlp.tasks.downstream.registry import get_task
from vlp.tasks.downstream.task import Downstream, load_task

MATCH = "match"
"""Kind of what a model folder without a task predicts."""


class Said(NamedTuple):
    """Answers with their probabilities, the likeliest first, and the kind of task."""

    kind: str
    answers: list[tuple[str, float]]

    def text(self) -> str:
        """Return lines for the terminal."""
        width = max(len(answer) for answer, _ in self.answers)
        return "\n".join(f"{answer.ljust(width)}  {p:.4f}" for answer, p in self.answers)


def predict_one(
    folder: str | Path,
    images: Sequence[str | Path],
    text: str | None = None,
    device: torch.device | str | None = None,
    precision: Precision | None = None,
) -> Said:
    """Predict what the folder's task does; without a task, whether text and image match.

    Args:
        folder: model folder or hub name.
        images: image files, two for a task about pairs. One that shows several panels is cut as
            the task was trained to.
        text: question, hypothesis, statement or caption; none for a model that writes captions.
        device: where to compute; None is this rank's GPU, or the CPU.
        precision: of the model; None: bf16 on a GPU, float32 elsewhere.

    Raises:
        EvaluationError: an image cannot be read, there are too many or too few, or the text is
            missing or not wanted, or is to match an image by a score that was never trained.
        FileNotFoundError: there is no such model.
    """
    with said_in_one_line():
        source = load_task(folder) if has_task(folder) else vlp.load(folder)
    _check(source, len(images), text)
    if isinstance(source, Loaded) and not source.model.match_is_trained:
        raise EvaluationError(
            f"{folder}: {NEVER_MATCHED}; `vlp evaluate retrieval` and `vlp anchors` work without it"
        )
    opened = [read_pair(path, "").image for path in images]
    model = source if isinstance(source, Downstream) else source.model
    with (
        torch.no_grad(),
        evaluating(model, device) as own_device,
        inference(own_device, precision),
    ):
        if isinstance(source, Loaded):
            seen = encode_one(source, opened[0], own_device)
            return Said(MATCH, match_of(source, seen, text or ""))
        evaluation = get_evaluation(source.kind)
        return Said(source.kind, evaluation.predict_one(source, opened, text or "", own_device))


def _check(source: Downstream | Loaded, images: int, text: str | None) -> None:
    kind, (wanted, parts), reads_text = MATCH, (1, 1), True
    if isinstance(source, Downstream):
        kind, reads_text = source.kind, get_task(source.kind).card.text
        wanted, parts = get_evaluation(kind).image_count(source)
    if images != wanted:
        cut = f", to be cut into {parts} parts" if parts > 1 else ""
        raise EvaluationError(
            f"{kind} is about {wanted} image{'s' if wanted > 1 else ''}{cut}, not {images}: give "
            f"--image FILE {'twice' if wanted > 1 else 'once'}"
        )
    if not reads_text and text is not None:
        raise EvaluationError(f"a model for {kind} reads no text: leave --text out")
    if reads_text and not (text or "").strip():
        raise EvaluationError(f"{kind} needs a text: give --text")


def match_of(loaded: Loaded, image: ImageFeatures, text: str) -> list[tuple[str, float]]:
    """Return whether a text describes an image, with probabilities, the likelier first."""
    tokens = (part.to(image.states.device) for part in loaded.text([text]))
    matches = float(loaded.model.match(image, loaded.model.encode_text(*tokens)).sigmoid())
    return sorted([("matches", matches), ("does not", 1 - matches)], key=lambda one: -one[1])
