"""What a model says about shards, labelled or not, for a benchmark's server or for other programs.

A fine-tuned folder does what it was trained for. One without a task (pretrained, or fine-tuned for
retrieval) chooses boxes for referring expressions, as `evaluation.grounding.grounding` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

import vlp
from evaluation.core.samples import EvaluationError
from evaluation.downstream.blocks import EvaluatedItems
from evaluation.downstream.submissions import (
    write_captions,
    write_nlvr2,
    write_refcoco,
    write_snli_ve,
    write_vqa,
)
from evaluation.grounding.grounding import evaluate_grounding
from vlp.config import ConfigError
from vlp.models.folder import local_folder
from vlp.tasks.downstream.registry import task_module
from vlp.tasks.downstream.task import TASK, load_task

GROUNDING = "grounding"
_TRUTH = ("answers", "types", "captions", "scores")
Row = dict[str, Any]


class Predictions(NamedTuple):
    """Of one model: the kind of its task, rows in the order of the shards, bad samples by kind."""

    kind: str
    rows: list[Row]
    skipped: dict[str, int]


def predict(
    folder: str | Path,
    shards: Sequence[str | Path],
    *,
    limit: int | None = None,
    batch: int = 64,
    device: torch.device | str | None = None,
    precision: Literal["float32", "bf16"] = "float32",
    progress: bool = False,
) -> Predictions:
    """Predict every item of some shards; the same for any number of ranks.

    Args:
        folder: model folder or hub name.
        shards: shard folders, read as one set.
        limit: only the first so many items.
        batch: items at once.
        device: where to compute; None is this rank's GPU, or the CPU.
        precision: of the model.
        progress: a bar on the first rank.

    Raises:
        EvaluationError: the folder is damaged, or nothing in the shards suits its task.
        ConfigError: a shard folder cannot be read.
        FileNotFoundError: there is no such model.
    """
    options: dict[str, Any] = {
        "limit": limit,
        "batch": batch,
        "device": device,
        "precision": precision,
        "progress": progress,
    }
    if not has_task(folder):
        return Predictions(GROUNDING, *_boxes(folder, shards, options))
    try:
        task = load_task(folder)
    except ValueError as error:
        raise EvaluationError(" ".join(str(error).split())) from error
    module = import_module(f"evaluation.downstream.{task_module(task.kind)}")
    rows, skipped = module.predictions(task, shards, **options)
    said = [{name: value for name, value in row.items() if name not in _TRUTH} for row in rows]
    return Predictions(task.kind, said, skipped)


def has_task(folder: str | Path) -> bool:
    """Whether a model folder was fine-tuned for a task with a head of its own.

    Raises:
        FileNotFoundError: there is no such model.
    """
    return (local_folder(folder) / TASK).is_file()


def write_official(path: Path, predictions: Predictions) -> None:
    """Write predictions in the format that the benchmark's server or evaluator takes.

    VQA results (JSON), NLVR2 (CSV), SNLI-VE (JSON lines), COCO captions (JSON), RefCOCO (JSON).
    Of NLVR v1's permutations, which share their identifier, each is named by its key.

    Raises:
        EvaluationError: the kind has no such format, or the shards lack what it needs.
    """
    if predictions.kind not in _FORMATS:
        raise EvaluationError(f"{predictions.kind} has no submission format; give --format jsonl")
    needed, write, convert = _FORMATS[predictions.kind]
    lacking = [row["key"] for row in predictions.rows if row.get(needed) is None]
    if lacking:
        raise EvaluationError(
            f"{path}: sample {lacking[0]} has no {_WHAT.get(needed, needed)}"
            f"{f' (and {len(lacking) - 1} more)' if len(lacking) > 1 else ''}, which the format "
            "needs; use shards that were made from the benchmark's own files, or --format jsonl"
        )
    write(path, [convert(row) for row in _told_apart(predictions.rows)])


def _told_apart(rows: Sequence[Row]) -> list[Row]:
    """Rows whose identifier others have too get their key for it, where that says more.

    Such a key, `dev-1572-0-3`, is what the evaluator of NLVR v1 reads. Samples that are there twice
    stay so.
    """
    counts = Counter(row.get("identifier", "") for row in rows)

    def named(row: Row) -> Row:
        own = row.get("identifier", "")
        shared = own and counts[own] > 1 and str(own) in row["key"]
        return {**row, "identifier": row["key"]} if shared else row

    return list(map(named, rows))


def _boxes(
    folder: str | Path, shards: Sequence[str | Path], options: dict[str, Any]
) -> EvaluatedItems:
    try:
        result = evaluate_grounding(vlp.load(folder), shards, resamples=1, **options)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; {folder} was not fine-tuned for a task, and without one a model only "
            "predicts where expressions point"
        ) from error
    except EvaluationError:
        raise
    except ValueError as error:
        raise EvaluationError(" ".join(str(error).split())) from error
    rows = [{k: v for k, v in row.items() if k not in _TRUTH} for row in result.predictions]
    return EvaluatedItems(rows, result.skipped)


Writer = Callable[[Path, Iterable[Row]], None]

# Of each kind: what a row must have, the writer, and a row as the writer takes it.
_FORMATS: dict[str, tuple[str, Writer, Callable[[Row], Row]]] = {
    "vqa": ("question_id", write_vqa, lambda row: row),
    "caption": ("image_id", write_captions, lambda row: row),
    "snli_ve": ("pairID", write_snli_ve, lambda row: {**row, "label": row["prediction"]}),
    "nlvr2": (
        "identifier",
        write_nlvr2,
        lambda row: {**row, "label": row["prediction"] == "True"},
    ),
    GROUNDING: ("box", write_refcoco, lambda row: {"sent_id": row["id"], "box": row["box"]}),
}
_WHAT = {"box": "proposals to choose from (data_tools refcoco --detections)"}
