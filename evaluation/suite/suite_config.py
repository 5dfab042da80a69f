"""What `python -m evaluation all` judges: models, and the tasks of each."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from evaluation.grounding.grounding import By
from evaluation.zeroshot.labelled_images import LABEL
from vlp.config import Config
from vlp.data.image.ablated_views import View
from vlp.metrics.vqa import Version
from vlp.tasks.downstream.vqa import Predict

_NAME = r"^[\w][\w.+@-]*$"


class Job(Config):
    """One model on one set; base of every task."""

    task: str
    shards: tuple[str, ...] = Field(min_length=1)
    name: str | None = Field(
        None, pattern=_NAME, description="of its table; null: the task's. Needed for a second set"
    )
    model: str | None = Field(
        None, description="folder, where the task has one of its own; null: the entry's"
    )
    limit: int | None = Field(None, ge=1, description="only the first so many items")
    batch: int = Field(64, ge=1)
    precision: Literal["float32", "bf16"] = "float32"

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        for key in values if isinstance(values, dict) else ():
            if key not in cls.model_fields:
                near = difflib.get_close_matches(str(key), cls.model_fields, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(cls.fields())}"
                raise ValueError(f"task {values.get('task')} has no option {key!r}; {hint}")
        return values

    @classmethod
    def fields(cls) -> tuple[str, ...]:
        """Names of all options."""
        return tuple(cls.model_fields)

    @property
    def label(self) -> str:
        """Of its table, and of the folder of its result."""
        return self.name or self.task


class RetrievalJob(Job):
    """Recall in both directions."""

    task: Literal["retrieval"] = "retrieval"
    rerank: int = Field(0, ge=0)
    rerank_by: Literal["sum", "match"] = "sum"
    temperature: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _used(self) -> RetrievalJob:
        if self.rerank_by == "match" and not self.rerank:
            raise ValueError("rerank_by says how to re-rank: give rerank, too")
        return self


class FinetunedJob(Job):
    """A model that was fine-tuned for the task."""

    task: Literal["snli_ve", "nlvr2", "nlvr2_assignment", "caption"]


class VqaJob(Job):
    """A model that was fine-tuned on questions."""

    task: Literal["vqa"] = "vqa"
    predict: Predict | None = Field(None, description="null: as the model is configured")
    version: Version | None = Field(None, description="of the evaluator; null: likewise")


class GroundingJob(Job):
    """Where lies what an expression means?"""

    task: Literal["grounding"] = "grounding"
    by: By | None = Field(None, description="null: what the model was chosen by, else gradcam")
    layer: int | None = None
    head: int | None = Field(
        None, ge=1, description="first word pieces that make the map; null: all"
    )
    view: View = "image"

    @model_validator(mode="after")
    def _used(self) -> GroundingJob:
        if self.by == "similarity" and self.layer is not None:
            raise ValueError("layer is of Grad-CAM, and the map is made by similarity")
        return self


class PointingJob(Job):
    """Does a word find its object? (generated corpus)"""

    task: Literal["pointing"] = "pointing"


class SwapsJob(Job):
    """Is an arrangement told from its swap? (generated corpus)"""

    task: Literal["swaps"] = "swaps"
    view: View = "image"


class ZeroShotJob(Job):
    """Classes of images, told by prompts."""

    task: Literal["zeroshot"] = "zeroshot"
    classes: str
    templates: str | None = None
    label_field: str = LABEL
    match: int = Field(0, ge=0)
    match_by: Literal["sum", "match"] = "sum"

    @model_validator(mode="after")
    def _used(self) -> ZeroShotJob:
        if self.match_by == "match" and not self.match:
            raise ValueError("match_by says how classes are scored again: give match, too")
        return self


AnyJob = Annotated[
    RetrievalJob | FinetunedJob | VqaJob | GroundingJob | PointingJob | SwapsJob | ZeroShotJob,
    Field(discriminator="task"),
]


class EvaluatedModel(Config):
    """A model, or the models of one method, under one name."""

    name: str = Field(pattern=_NAME)
    model: str | None = Field(None, description="folder or hub name of all tasks that name none")
    tasks: tuple[AnyJob, ...] = Field(min_length=1)

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
    """Everything that one call judges."""

    output: str = Field("runs/evaluation", description="folder of the results; --out replaces it")
    models: tuple[EvaluatedModel, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _comparable(self) -> SuiteConfig:
        names = [judged.name for judged in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two models are called {name!r}")
        first: dict[str, tuple[str, Job]] = {}
        for judged in self.models:
            for job in judged.tasks:
                owner, same = first.setdefault(job.label, (judged.name, job))
                if (same.task, same.shards, same.limit) != (job.task, job.shards, job.limit):
                    raise ValueError(
                        f"{job.label} is another task, or of other shards, in {judged.name} than "
                        f"in {owner}; one table is about one set: give it a `name` of its own"
                    )
        return self
