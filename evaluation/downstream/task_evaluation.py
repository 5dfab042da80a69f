"""Evaluation of downstream tasks by kind: figures, predictions, submission, report and page.

A built-in task is evaluated by this package's module of the same name as in `vlp.tasks.downstream`.
Other packages call `register_evaluation` where they register the task.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from PIL import Image

import vlp
from evaluation.downstream.submissions import Submission
from evaluation.encoder import count_truncated
from evaluation.jobs import Job
from evaluation.options import EvalOptions
from evaluation.results import Figure, Result, truncation_notes
from evaluation.samples import EvaluationError, single_line_errors
from evaluation.work_sharding import (
    EvaluatedItems,
    evaluate_blocks,
    evaluating,
    evaluation_autocast,
)
from vlp.data.shards.shard_reader import Item
from vlp.models.folder import Loaded
from vlp.precision import NotFiniteError
from vlp.tasks.downstream.registry import get_task, task_kinds, task_module
from vlp.tasks.downstream.task import Downstream, load_task
from vlp.tasks.retrieval.task import PairsTask


def sentence_of(row: Mapping[str, Any]) -> str:
    """Return the sentence of an NLVR2 row, by which the official evaluators count consistency.

    Equal texts with identifiers of two sets are two sentences. Without an identifier, equal texts
    are one sentence.
    """
    parts = str(row.get("identifier") or "").split("-")
    # NLVR2: split-set-pair-sentence.
    if len(parts) == 4:
        return "-".join((parts[0], parts[1], parts[3]))
    # NLVR v1: sentence-image.
    return f"{parts[0]}: {row['text']}" if len(parts) == 2 else str(row["text"])


Row = dict[str, Any]


class Scored(NamedTuple):
    """Figures by name, the main one first, and notes under their table."""

    figures: dict[str, Figure]
    notes: tuple[str, ...] = ()


class PageAction(NamedTuple):
    """A tab of the interactive page, with the labels of its parts."""

    tab: str
    # Name of the HTTP endpoint, such as `answer`.
    name: str
    button: str
    output: str
    # Label of the text input; None if the task reads no text.
    text: str | None = None


class TaskEvaluation:
    """Base of the evaluations; a subclass adds `row` and `score`, or overrides `evaluate`."""

    kind: str
    title: str
    # Figures that come first in the report's table.
    columns: ClassVar[tuple[str, ...]] = ()
    # Field of a row that holds the annotation, and the error if no row has it.
    truth: ClassVar[str] = "label"
    no_truth: ClassVar[str] = "no sample has a label"
    # Fields of rows that are not written into files.
    hidden: ClassVar[tuple[str, ...]] = ()
    # Field of a row that holds the text that the model reads; "" if it reads none.
    text_field: ClassVar[str] = ""
    # Further options of `evaluate`, which are fields of `job`.
    option_names: ClassVar[tuple[str, ...]] = ()
    job: ClassVar[type[Job]] = Job
    submission: Submission | None = None
    action: ClassVar[PageAction | None] = None
    # Evaluates any loaded model on shards; None for a task that needs a fine-tuned head.
    evaluate_loaded: ClassVar[Callable[..., Any] | None] = None

    def row(self, task: Any, item: Item, example: Any, prediction: str) -> Row:
        """Return ids, texts, prediction, truth and `image` (`RawSample.image_name`) of an item."""
        raise NotImplementedError

    def score(self, task: Any, rows: Sequence[Row], resamples: int, **options: Any) -> Scored:
        """Compute the figures of annotated rows, and set the field `scores` of each row."""
        raise NotImplementedError

    def require_tools(self, task: Any) -> None:
        """Raise EvaluationError if a program that `score` needs is missing."""

    def predict(self, task: Any, batch: Any, **options: Any) -> list[str]:
        """Predict every item of a batch."""
        predictions: list[str] = task.predict(batch)
        return predictions

    def evaluate(
        self,
        task: Any,
        shards: Sequence[str | Path],
        options: EvalOptions = EvalOptions(),
        **kwargs: Any,
    ) -> Result:
        """Evaluate a task on shards; the same for any number of ranks.

        Items without annotation are predicted but not scored. kwargs: options of `option_names`.
        """
        # Before the predictions, which may take hours.
        self.require_tools(task)
        rows, skipped = self.predictions(task, shards, options, **kwargs)
        folders = tuple(map(str, shards))
        annotated = [row for row in rows if row[self.truth]]
        if not annotated:
            raise EvaluationError(
                f"{', '.join(folders)}: {self.no_truth}; `vlp evaluate predict` writes predictions "
                "without scores"
            )
        figures, notes = self.score(task, annotated, options.resamples, **kwargs)
        if unlabelled := len(rows) - len(annotated):
            notes = (*notes, f"{unlabelled} items have no annotation: predicted but not scored.")
        notes = (
            *notes,
            *truncation_notes(self.count_truncated(task.text, rows), len(rows), "texts"),
        )
        # Training data are allowed, to measure the training error.
        if overlap := training_folders(task, folders):
            notes = (*notes, f"Careful: the model was trained on {', '.join(overlap)}.")
        return Result(
            kind=task.kind,
            counts={"items": len(rows)},
            shards=folders,
            figures=figures,
            predictions=drop_fields(rows, self.hidden),
            skipped=skipped,
            notes=notes,
        )

    def predictions(
        self,
        task: Any,
        shards: Sequence[str | Path],
        options: EvalOptions = EvalOptions(),
        **kwargs: Any,
    ) -> EvaluatedItems:
        """Predict every item, annotated or not; arguments as in `evaluate`."""
        if unknown := kwargs.keys() - set(self.option_names):
            raise TypeError(f"{self.kind} has no option {', '.join(sorted(unknown))}")
        dataset = task.dataset(shards, options.limit)

        def predict_rows(examples: Sequence[tuple[Item, Any]]) -> list[Row]:
            inputs = dataset.collate([example for _, example in examples]).to(torch_device)
            with (
                single_line_errors(NotFiniteError),
                torch.no_grad(),
                evaluation_autocast(torch_device, options.precision),
            ):
                predictions = self.predict(task, inputs, **kwargs)
            return [
                self.row(task, *pair, prediction)
                for pair, prediction in zip(examples, predictions, strict=True)
            ]

        with evaluating(task, options.device) as torch_device:
            rows, skipped = evaluate_blocks(
                dataset.items, dataset.make, predict_rows, options, torch_device
            )
        return EvaluatedItems(self.merge_rows(rows), skipped)

    def count_truncated(self, tokenize: Callable[..., Any], rows: Sequence[Row]) -> int:
        """Return the number of rows with a text that `tokenize` truncates."""
        if not self.text_field:
            return 0
        return count_truncated(tokenize, [row[self.text_field] for row in rows])

    def merge_rows(self, rows: list[Row]) -> list[Row]:
        """Merge rows of samples that are parts of one item; by default every sample is an item."""
        return rows

    def evaluate_folder(
        self,
        folder: Path,
        shards: Sequence[str | Path],
        options: EvalOptions = EvalOptions(),
        **kwargs: Any,
    ) -> Any:
        """Evaluate a model folder, fine-tuned for the task unless `evaluate_loaded` is set."""
        if self.evaluate_loaded is not None:
            return self.evaluate_loaded(load_model(folder), shards, options, **kwargs)
        task = load_for_evaluation(folder)
        if task.kind != self.kind:
            raise EvaluationError(f"{folder} is fine-tuned for {task.kind}, not for {self.kind}")
        return self.evaluate(task, shards, options, **kwargs)

    def image_count(self, task: Any) -> tuple[int, int]:
        """Return the number of images of an item, and of panels of each image."""
        return 1, 1

    def predict_item(
        self, task: Any, images: Sequence[Image.Image], text: str, device: torch.device
    ) -> list[tuple[str, float]]:
        """Return predictions for images and a text with probabilities, the likeliest first."""
        raise EvaluationError(f"{self.kind!r} predicts from shards, not from image files")


def training_folders(task: Any, folders: Sequence[str]) -> list[str]:
    """Return the shard folders that a task's configuration lists as training data."""
    data = getattr(task.config, "data", None)
    train_folders = {os.path.abspath(folder) for folder in getattr(data, "train", ())}
    return [folder for folder in folders if os.path.abspath(folder) in train_folders]


def drop_fields(rows: Sequence[Row], fields: Sequence[str]) -> list[Row]:
    """Return rows without some fields."""
    return [{name: value for name, value in row.items() if name not in fields} for row in rows]


def load_for_evaluation(folder: str | Path) -> Downstream:
    """Load the fine-tuned task of a folder."""
    with single_line_errors():
        return load_task(folder)


def load_model(folder: str | Path) -> Loaded:
    """Load any model folder."""
    with single_line_errors():
        return vlp.load(folder)


_registered: dict[str, TaskEvaluation] = {}


def register_evaluation(evaluation: TaskEvaluation) -> None:
    """Register an evaluation under its kind; it replaces an earlier evaluation of the kind."""
    _registered[evaluation.kind] = evaluation


def get_evaluation(kind: str) -> TaskEvaluation:
    """Return the evaluation of a kind, importing its module on first use."""
    if kind not in _registered and task_module(kind):
        import_module(f"evaluation.downstream.{task_module(kind)}")
    # Importing a plugin's task registers its evaluation, too; an unknown kind is an error.
    if kind not in _registered:
        get_task(kind)
    if kind not in _registered:
        raise ValueError(f"no evaluation is registered for tasks {kind!r}")
    return _registered[kind]


def page_actions() -> dict[PageAction, list[str]]:
    """Return the page's actions, each with the kinds of fine-tuned models that offer it."""
    actions: dict[PageAction, list[str]] = {}
    for kind in task_kinds():
        if action := get_evaluation(kind).action:
            actions.setdefault(action, []).append(kind)
    return actions


def evaluate_task(
    task: Downstream | PairsTask,
    shards: Sequence[str | Path],
    options: EvalOptions = EvalOptions(),
    **kwargs: Any,
) -> Result:
    """Evaluate a task on shards; the same for any number of ranks."""
    return get_evaluation(task.kind).evaluate(task, shards, options, **kwargs)
