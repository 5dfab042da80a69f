"""Predictions on shards, labelled or not, for a benchmark's server or for other programs.

A model folder without a task, or fine-tuned for retrieval, selects boxes of referring expressions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from evaluation.downstream.task_evaluation import (
    Row,
    drop_fields,
    get_evaluation,
    load_for_evaluation,
    load_model,
)
from evaluation.encoder import encode_image, warn_if_truncated
from evaluation.grounding.grounding import evaluate_grounding
from evaluation.options import EvalOptions
from evaluation.probes.anchor_maps import read_pair
from evaluation.results import UNTRAINED_MATCH
from evaluation.samples import EvaluationError, single_line_errors
from evaluation.work_sharding import EvaluatedItems, evaluating, evaluation_autocast
from vlp.config import ConfigError, Precision
from vlp.models.cross_encoder import ImageFeatures
from vlp.models.folder import Loaded
from vlp.precision import NotFiniteError, require_finite
from vlp.tasks.downstream.registry import get_task
from vlp.tasks.downstream.task import Downstream, has_task


class Predictions(NamedTuple):
    """Predictions of shard folders."""

    kind: str
    # In the order of the shards.
    rows: list[Row]
    # Number of skipped samples by kind.
    skipped: dict[str, int]
    # Number of rows with a text that the tokenizer truncates.
    num_truncated: int


def predict(
    folder: str | Path, shards: Sequence[str | Path], options: EvalOptions = EvalOptions()
) -> Predictions:
    """Predict every item of shard folders; the same for any number of ranks."""
    source = load_for_evaluation(folder) if has_task(folder) else load_model(folder)
    if isinstance(source, Downstream):
        evaluation = get_evaluation(source.kind)
        rows, skipped = evaluation.predictions(source, shards, options)
    else:
        evaluation = get_evaluation("grounding")
        rows, skipped = _predict_boxes(source, folder, shards, options)
    # Predictions hold neither annotations nor scores.
    hidden = (*evaluation.hidden, "scores")
    num_truncated = evaluation.count_truncated(source.text, rows)
    return Predictions(evaluation.kind, drop_fields(rows, hidden), skipped, num_truncated)


def write_official(path: Path, predictions: Predictions) -> None:
    """Write predictions in the format that the benchmark's server or evaluator takes.

    VQA results (JSON), NLVR2 (CSV; NLVR v1's permutations by key), SNLI-VE (JSON lines), COCO
    captions (JSON), RefCOCO (JSON).
    """
    submission = get_evaluation(predictions.kind).submission
    if submission is None:
        raise EvaluationError(f"{predictions.kind} has no submission format; give --format jsonl")
    keys = [row["key"] for row in predictions.rows if row.get(submission.required_field) is None]
    if keys:
        raise EvaluationError(
            f"{path}: sample {keys[0]} has no {submission.missing or submission.required_field}"
            f"{f' (and {len(keys) - 1} more)' if len(keys) > 1 else ''}, which the format "
            "needs; use shards that were made from the benchmark's own files, or --format jsonl"
        )
    submission.write(path, [submission.convert(row) for row in _unique_ids(predictions.rows)])


def _unique_ids(rows: Sequence[Row]) -> list[Row]:
    """Replace an `identifier` of several rows by the rows' keys, if the keys contain it."""
    # NLVR v1 repeats a statement with permuted images: its evaluator reads the key, `dev-1572-0-3`.
    # Other repeats keep the identifier, and the writer refuses them.
    counts = Counter(row.get("identifier", "") for row in rows)

    def with_key(row: Row) -> Row:
        identifier = row.get("identifier", "")
        repeats = identifier and counts[identifier] > 1 and str(identifier) in row["key"]
        return {**row, "identifier": row["key"]} if repeats else row

    return list(map(with_key, rows))


def _predict_boxes(
    loaded: Loaded, folder: str | Path, shards: Sequence[str | Path], options: EvalOptions
) -> EvaluatedItems:
    try:
        # One resample, as only the rows are used.
        result = evaluate_grounding(loaded, shards, replace(options, resamples=1))
    except ConfigError as error:
        raise ConfigError(
            f"{error}; {folder} is not fine-tuned for a task, so it predicts only boxes of "
            "referring expressions"
        ) from error
    return EvaluatedItems(result.predictions or [], result.skipped)


# Kind of the predictions of a model folder without a task, for an image and a text.
MATCH = "match"


class Answers(NamedTuple):
    """Kind of task, and answers with probabilities, the likeliest first."""

    kind: str
    answers: list[tuple[str, float]]

    def text(self) -> str:
        """Return lines for the terminal."""
        width = max(len(answer) for answer, _ in self.answers)
        return "\n".join(f"{answer.ljust(width)}  {p:.4f}" for answer, p in self.answers)


def predict_item(
    folder: str | Path,
    images: Sequence[str | Path],
    text: str | None = None,
    device: torch.device | str | None = None,
    precision: Precision | None = None,
) -> Answers:
    """Predict by the folder's task; without a task, whether text and image match.

    Args:
        images: image files: one; for a task about image pairs two, or one with both as panels.
        text: question, hypothesis, statement or caption; None for a captioning model.
    """
    source = load_for_evaluation(folder) if has_task(folder) else load_model(folder)
    _require_inputs(source, len(images), text)
    if isinstance(source, Loaded) and not source.model.match_is_trained:
        raise EvaluationError(
            f"{folder}: {UNTRAINED_MATCH}; `vlp evaluate retrieval` and `vlp anchors` work "
            "without it"
        )
    decoded = [read_pair(path, "").image for path in images]
    model = source if isinstance(source, Downstream) else source.model
    warn_if_truncated(source.text, text or "")
    with (
        single_line_errors(NotFiniteError),
        torch.no_grad(),
        evaluating(model, device) as run_device,
        evaluation_autocast(run_device, precision),
    ):
        if isinstance(source, Loaded):
            features = encode_image(source, decoded[0], run_device)
            return Answers(MATCH, match_probabilities(source, features, text or ""))
        evaluation = get_evaluation(source.kind)
        answers = evaluation.predict_item(source, decoded, text or "", run_device)
        return Answers(source.kind, answers)


def _require_inputs(source: Downstream | Loaded, num_images: int, text: str | None) -> None:
    """Raise EvaluationError for a wrong number of images, a missing or an unused text."""
    kind, (count, panels), reads_text = MATCH, (1, 1), True
    if isinstance(source, Downstream):
        kind, reads_text = source.kind, get_task(source.kind).card.text
        count, panels = get_evaluation(kind).image_count(source)
    if num_images != count:
        layout = f" with {panels} panels" if panels > 1 else ""
        raise EvaluationError(
            f"{kind} takes {count} image{'s' if count > 1 else ''}{layout}, not {num_images}: "
            f"write --image FILE{' FILE' if count > 1 else ''}"
        )
    if not reads_text and text is not None:
        raise EvaluationError(f"a model for {kind} reads no text: leave --text out")
    if reads_text and not (text or "").strip():
        raise EvaluationError(f"{kind} needs a text: add --text TEXT")


def match_probabilities(loaded: Loaded, image: ImageFeatures, text: str) -> list[tuple[str, float]]:
    """Return `matches` and `does not` with probabilities, the likelier first."""
    tokens = (part.to(image.states.device) for part in loaded.text([text]))
    log_odds = loaded.model.match(image, loaded.model.encode_text(*tokens))
    matches = float(require_finite(log_odds).sigmoid())
    return sorted([("matches", matches), ("does not", 1 - matches)], key=lambda pair: -pair[1])
