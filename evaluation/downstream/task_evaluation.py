"""Evaluation of one kind of downstream task: figures, predictions, submission, report and page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from PIL import Image

from evaluation.core.eval_mode import evaluating, inference
from evaluation.core.results import Figure
from evaluation.core.samples import EvaluationError, said_in_one_line
from evaluation.downstream.blocks import EvaluatedItems, evaluate_blocks
from evaluation.downstream.job import Job
from evaluation.downstream.result import TaskResult, with_truth
from evaluation.downstream.submissions import Submission
from vlp.config import Precision
from vlp.data.downstream.items import Item
from vlp.data.schema import Annotation, captions_of
from vlp.models.folder import Loaded
from vlp.tasks.downstream.task import Downstream, load_task

Row = dict[str, Any]


class Scored(NamedTuple):
    """Figures by name, the main one first, and notes under their table."""

    figures: dict[str, Figure]
    notes: tuple[str, ...] = ()


class PageAction(NamedTuple):
    """A tab of the page that tries models by hand.

    tab: its label. name: of the interface, `/answer`. verb: as in "cannot answer questions".
    button, output: labels. text: label of the text field, None where the task reads no text.
    """

    tab: str
    name: str
    verb: str
    button: str
    output: str
    text: str | None = None


class TaskEvaluation:
    """Base of the evaluations; a subclass adds `row` and `score`, or its own `evaluate`.

    kind: of the task. title: of its table in reports. columns: figures that come first in that
    table, which then keeps runs as rows. truth: field of a row that people have filled in where it
    can be scored; no_truth: the error's words where no row has it. hidden: fields of a row that
    are not saved. options: names of further options of `evaluate`. job: their configuration.
    submission: the benchmark's format. action: on the page. case_scores: figures by which a report
    chooses best and worst cases, the first that there is; none means no cases. draws_maps: whether
    the cases show the map of a row's `text`.
    """

    kind: str
    title: str
    columns: ClassVar[tuple[str, ...]] = ()
    truth: ClassVar[str] = "label"
    no_truth: ClassVar[str] = "no sample has a label"
    hidden: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[tuple[str, ...]] = ()
    job: ClassVar[type[Job]] = Job
    submission: Submission | None = None
    action: ClassVar[PageAction | None] = None
    case_scores: ClassVar[tuple[str, ...]] = ()
    draws_maps: ClassVar[bool] = False

    def row(self, task: Any, item: Item, example: Any, prediction: str) -> Row:
        """Return ids, texts, prediction, truth and `image` (`blocks.image_name`) of an item."""
        raise NotImplementedError

    def score(self, task: Any, rows: Sequence[Row], resamples: int, **options: Any) -> Scored:
        """Compute the figures of rows with truth, and give each row its `scores`."""
        raise NotImplementedError

    def require_tools(self, task: Any) -> None:
        """Check that what `score` needs is installed, before anything is predicted.

        Raises:
            EvaluationError: it is not.
        """

    def predict(self, task: Any, batch: Any, **options: Any) -> list[str]:
        """Predict every item of a batch."""
        predicted: list[str] = task.predict(batch)
        return predicted

    def evaluate(
        self,
        task: Any,
        shards: Sequence[str | Path],
        *,
        limit: int | None = None,
        batch: int = 64,
        device: torch.device | str | None = None,
        precision: Precision | None = None,
        workers: int | None = None,
        resamples: int = 1000,
        progress: bool = False,
        **options: Any,
    ) -> TaskResult:
        """Evaluate a task on shards; the same for any number of ranks.

        Items without truth, as in a test set, are predicted and not counted.

        Args:
            task: as `load_task` gives it, or one in training.
            shards: shard folders, evaluated as one set.
            limit: only the first so many items.
            batch: items at once.
            device: where to compute; None is this rank's GPU, or the CPU.
            precision: of the model.
            workers: processes that read; None: this rank's cores up to 8 on a GPU, none on a CPU.
            resamples: bootstrap draws over images.
            progress: a bar on the first rank.
            options: named in `options`.

        Raises:
            EvaluationError: no item can be used or has truth, or a tool of the figures is missing.
            ConfigError: a shard folder cannot be read.
        """
        self.require_tools(task)
        rows, skipped = self.predictions(
            task,
            shards,
            limit=limit,
            batch=batch,
            device=device,
            precision=precision,
            workers=workers,
            progress=progress,
            **options,
        )
        folders = tuple(map(str, shards))
        known = with_truth(rows, self.truth, folders, self.no_truth)
        figures, notes = self.score(task, known, resamples, **options)
        if unjudged := len(rows) - len(known):
            notes = (*notes, f"{unjudged} of the items have no truth: predicted, and not judged.")
        if seen := trained_on(task, folders):
            notes = (*notes, f"Careful: the model was trained on {', '.join(seen)}.")
        return TaskResult(
            kind=task.kind,
            items=len(rows),
            shards=folders,
            figures=figures,
            predictions=without(rows, self.hidden),
            skipped=skipped,
            notes=notes,
        )

    def predictions(
        self,
        task: Any,
        shards: Sequence[str | Path],
        *,
        limit: int | None = None,
        batch: int = 64,
        device: torch.device | str | None = None,
        precision: Precision | None = None,
        workers: int | None = None,
        progress: bool = False,
        **options: Any,
    ) -> EvaluatedItems:
        """Predict every item, with truth or without; arguments and errors as in `evaluate`."""
        if unknown := options.keys() - set(self.options):
            raise TypeError(f"{self.kind} has no option {', '.join(sorted(unknown))}")
        dataset = task.dataset(shards, limit)

        def evaluate(made: Sequence[tuple[Item, Any]]) -> list[Row]:
            inputs = dataset.collate([example for _, example in made]).to(own_device)
            with torch.no_grad(), inference(own_device, precision):
                predicted = self.predict(task, inputs, **options)
            return [self.row(task, *one, said) for one, said in zip(made, predicted)]

        with evaluating(task, device) as own_device:
            rows, skipped = evaluate_blocks(
                dataset.items,
                batch,
                dataset.make,
                evaluate,
                progress,
                device=own_device,
                workers=workers,
            )
        return EvaluatedItems(self.joined(rows), skipped)

    def joined(self, rows: list[Row]) -> list[Row]:
        """Return rows that are one item each, where samples may be parts of one."""
        return rows

    def evaluate_folder(self, folder: Path, shards: Sequence[str | Path], **options: Any) -> Any:
        """Evaluate a model folder, as a job of a suite.

        Raises:
            EvaluationError: it is fine-tuned for another task, or as `evaluate` says.
            FileNotFoundError: there is no such model, or it has no task.
            ValueError: it is damaged.
        """
        task = load_task(folder)
        if task.kind != self.kind:
            raise EvaluationError(f"{folder} is fine-tuned for {task.kind}, not for {self.kind}")
        return self.evaluate(task, shards, **options)

    def predict_without_head(
        self, loaded: Loaded, shards: Sequence[str | Path], **options: Any
    ) -> EvaluatedItems:
        """Predict with a model that has no head; arguments and errors as of `predictions`."""
        raise EvaluationError(f"{self.kind} needs a fine-tuned model")

    def image_count(self, task: Any) -> tuple[int, int]:
        """Return how many images an item has, and into how many panels each is cut."""
        return 1, 1

    def predict_one(
        self, task: Any, images: Sequence[Image.Image], text: str, device: torch.device
    ) -> list[tuple[str, float]]:
        """Return predictions for images and a text with probabilities, the likeliest first.

        Raises:
            EvaluationError: the kind predicts nothing of single images.
        """
        raise EvaluationError(f"nothing is said about single images by a task {self.kind!r}")

    def fits(self, row: Mapping[str, Any], annotation: Annotation) -> bool:
        """Return whether a row is of the sample with that annotation and the row's key."""
        texts = annotation.statement, annotation.hypothesis, "\n".join(captions_of(annotation))
        return row.get("text") in texts

    def lines(self, row: Mapping[str, Any], annotation: Annotation) -> Iterator[tuple[str, str]]:
        """Yield labelled texts of a row for a case of a report."""
        yield "text", str(row.get("text"))
        if "prediction" in row:
            yield "said", str(row["prediction"])
            yield "truth", str(row["label"])

    def box(self, row: Mapping[str, Any], annotation: Annotation) -> Sequence[float] | None:
        """Return the box [x, y, width, height] that a row's text means, if it has one."""
        return None


def trained_on(task: Any, folders: Sequence[str]) -> list[str]:
    """Return those of some shard folders that a task's configuration names as training data."""
    data = getattr(task.config, "data", None)
    named = {os.path.abspath(folder) for folder in getattr(data, "train", ())}
    return [folder for folder in folders if os.path.abspath(folder) in named]


def without(rows: Sequence[Row], fields: Sequence[str]) -> list[Row]:
    """Return rows without some fields."""
    return [{name: value for name, value in row.items() if name not in fields} for row in rows]


def load_for_evaluation(folder: str | Path) -> Downstream:
    """Load the fine-tuned task of a folder.

    Raises:
        EvaluationError: it is damaged, or does not fit together.
        FileNotFoundError: there is no such model, or it has no task.
    """
    with said_in_one_line():
        return load_task(folder)
