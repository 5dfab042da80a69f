"""Configuration of `vlp evaluate all`: models, and the tasks of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from evaluation.downstream.job import NAME, Job
from evaluation.downstream.registry import get_evaluation
from evaluation.zeroshot.labelled_images import LABEL
from vlp.config import Choice, Config, ConfigError, LocalPath, validated
from vlp.data.image.ablated_views import View
from vlp.tasks.downstream.registry import task_kinds


class PointingJob(Job):
    """Pointing accuracy of words (generated corpus, COCO)."""

    task: Literal["pointing"] = Field("pointing", description="what is evaluated")
    controls: bool = Field(False, description="beside other pointers, and controls without text")


class SwapsJob(Job):
    """Accuracy on swapped arrangements (generated corpus)."""

    task: Literal["swaps"] = Field("swaps", description="what is evaluated")
    view: View = Field("image", description="what the model is shown")


class FoilsJob(Job):
    """Accuracy on captions with one thing exchanged."""

    task: Literal["foils"] = Field("foils", description="what is evaluated")
    seed: int = Field(0, ge=0, description="of the choice of foils")
    view: View = Field("image", description="what the model is shown")


class ZeroShotJob(Job):
    """Zero-shot classification of images by prompts."""

    task: Literal["zeroshot"] = Field("zeroshot", description="what is evaluated")
    classes: str = Field(description="file of class names, one a line")
    templates: str | None = Field(None, description="file of prompts; null: a photo of a {}.")
    label_field: str = Field(LABEL, description="key of a sample's class in its JSON")
    match: int = Field(0, ge=0, description="best classes of an image that are scored again by ITM")
    match_by: Literal["sum", "match"] = Field(
        "sum", description="the match score is added to the similarity, or replaces it"
    )

    @model_validator(mode="after")
    def _used(self) -> ZeroShotJob:
        if self.match_by == "match" and not self.match:
            raise ValueError("match_by says how classes are scored again: give match, too")
        return self


PROBES: dict[str, type[Job]] = {
    "pointing": PointingJob,
    "swaps": SwapsJob,
    "foils": FoilsJob,
    "zeroshot": ZeroShotJob,
}
"""Evaluations that belong to no downstream task."""


def job_names() -> tuple[str, ...]:
    """Return the names of everything that a suite evaluates."""
    return (*task_kinds(), *PROBES)


def job_class(name: str) -> type[Job]:
    """Return the class of a job.

    Raises:
        ValueError: there is nothing of that name to evaluate.
    """
    if name in PROBES:
        return PROBES[name]
    if name not in task_kinds():
        raise ValueError(f"unknown task {name!r}; there are {', '.join(map(repr, job_names()))}")
    return get_evaluation(name).job


AnyJob = Annotated[Job, Choice("task", job_names, job_class)]


class EvaluatedModel(Config):
    """A model, or the models of one method, under one name."""

    name: str = Field(pattern=NAME, description="its row in every table")
    model: str | None = Field(
        None,
        description="folder or hub name of all tasks that name none; a dual encoder of another "
        "library is `transformers:NAME` or `open_clip:ARCHITECTURE/TAG`",
    )
    tasks: tuple[AnyJob, ...] = Field(min_length=1, description="what it is evaluated on")

    @model_validator(mode="after")
    def _told_apart(self) -> EvaluatedModel:
        labels = [job.label for job in self.tasks]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"{self.name} has two tasks {label!r}: give each a `name`")
        for job in self.tasks:
            if job.model is None and self.model is None:
                raise ValueError(f"{self.name}, {job.label}: neither it nor its entry has a model")
        return self


class SuiteConfig(Config):
    """Everything that one call evaluates."""

    output: LocalPath = Field(
        "runs/evaluation", description="folder of the results; --out replaces it"
    )
    models: tuple[EvaluatedModel, ...] = Field(min_length=1, description="that are compared")

    @model_validator(mode="after")
    def _comparable(self) -> SuiteConfig:
        names = [entry.name for entry in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two models are called {name!r}")
        first: dict[str, tuple[str, Job]] = {}
        for entry in self.models:
            for job in entry.tasks:
                owner, same = first.setdefault(job.label, (entry.name, job))
                if (same.task, same.shards, same.limit) != (job.task, job.shards, job.limit):
                    raise ValueError(
                        f"{job.label} is another task, or of other shards, in {entry.name} than "
                        f"in {owner}; one table is about one set: give it a `name` of its own"
                    )
        return self


def suite_of(
    models: Sequence[str],
    shards: Sequence[str],
    labelled: Sequence[str] = (),
    classes: str | None = None,
    **options: Any,
) -> SuiteConfig:
    """Return the configuration that evaluates each model by all that its data allow.

    Args:
        models: folders, hub names, or models of other libraries.
        shards: with captions, for retrieval and foils.
        labelled: with classes, for zero-shot classification; goes with `classes`.
        classes: file of class names.
        options: of every task, such as `limit` and `batch`.

    Raises:
        ConfigError: the models are not told apart by their names, or only one of `labelled` and
            `classes` is given.
    """
    if bool(labelled) != (classes is not None):
        raise ConfigError(
            "--labelled and --classes go together: images of classes, and their names"
        )
    tasks: list[dict[str, Any]] = [
        {"task": task, "shards": shards} for task in ("retrieval", "foils") if shards
    ]
    if labelled:
        tasks.append({"task": "zeroshot", "shards": labelled, "classes": classes})
    entries = [
        {"name": _row(model), "model": model, "tasks": [task | options for task in tasks]}
        for model in models
    ]
    return validated({"models": entries}, SuiteConfig, "vlp evaluate suite")


def _row(model: str) -> str:
    """Return a model's name as a row's, in letters that a folder may have."""
    return re.sub(r"[^\w.+@-]+", "-", model).strip("-.") or "model"
