"""Options of every evaluation, from a suite file or a command line, without heavy imports."""

from __future__ import annotations

import difflib
import os
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from vlp.config import Config, Precision
from vlp.io import as_url
from vlp.tasks.vqa.metrics import Version

NAME = r"^[\w][\w.+@-]*$"
LABEL, BANK_TEMPERATURE = "label", 0.1
View = Literal["image", "shuffled", "blank"]
CombineScores = Literal["sum", "match"]


class Job(Config):
    """One model on one set."""

    task: str = Field(description="what is evaluated")
    shards: tuple[str, ...] = Field(min_length=1, description="folders to evaluate on")
    name: str | None = Field(
        None,
        pattern=NAME,
        description="name of the table; null: the task's; needed for a second set",
    )
    model: str | None = Field(None, description="model of this task alone; null: the entry's")
    limit: int | None = Field(None, ge=1, description="only the first N items")
    batch: int = Field(64, ge=1, description="items of one encoder call")
    precision: Precision | None = Field(None, description="null: bf16 on a GPU, float32 elsewhere")

    @model_validator(mode="before")
    @classmethod
    def _check_options(cls, values: Any) -> Any:
        # Before pydantic's check, whose message has no hint at a similar option.
        for key in values if isinstance(values, dict) else ():
            if key not in cls.model_fields:
                matches = difflib.get_close_matches(str(key), cls.model_fields, n=1)
                fields = ", ".join(cls.model_fields)
                hint = f"did you mean {matches[0]!r}?" if matches else f"it has {fields}"
                raise ValueError(f"task {values.get('task')} has no option {key!r}; {hint}")
        return values

    @field_validator("shards")
    @classmethod
    def _require_unique(cls, shards: tuple[str, ...]) -> tuple[str, ...]:
        paths = [folder if as_url(folder) else os.path.realpath(folder) for folder in shards]
        if repeated := [folder for folder, path in zip(shards, paths) if paths.count(path) > 1]:
            raise ValueError(f"{repeated[0]} is named twice, and its samples would count twice")
        return shards

    @property
    def label(self) -> str:
        """Return the name of the table, which is also the folder of the result."""
        return self.name or self.task

    def options(self) -> dict[str, Any]:
        """Return the fields that `Job` does not have."""
        return self.model_dump(include=set(type(self).model_fields) - set(Job.model_fields))


class RetrievalJob(Job):
    """Image-text retrieval: recall in both directions.

    With --rerank the cross-modal encoder re-ranks the nearest candidates.
    """

    task: Literal["retrieval"] = Field("retrieval", description="what is evaluated")
    rerank: int = Field(0, ge=0, description="candidates that the cross-modal encoder scores")
    rerank_by: CombineScores = Field(
        "sum", description="the match score is added to the similarity, or replaces it"
    )
    temperature: float | None = Field(
        None,
        gt=0,
        description="divides the similarity in the sum (null: the model's); half of it halves the "
        "weight of the match score",
    )
    features: tuple[str, ...] = Field(
        (), description="stored features of all images, the bank's too, by the model's tower"
    )
    bank: tuple[str, ...] = Field(
        (),
        description="shards of other pairs, such as training pairs, for query-bank normalisation: "
        "lowers scores of images and captions near to most queries",
    )
    bank_temperature: float = Field(
        BANK_TEMPERATURE,
        gt=0,
        description="temperature of the bank; a low value weights the nearest queries",
    )

    @model_validator(mode="after")
    def _check_use(self) -> RetrievalJob:
        if self.rerank_by == "match" and not self.rerank:
            raise ValueError("rerank_by is an option of re-ranking: set rerank, too")
        if self.temperature is not None and (not self.rerank or self.rerank_by == "match"):
            raise ValueError("temperature is an option of re-ranking by sum: set rerank, too")
        if "bank_temperature" in self.model_fields_set and not self.bank:
            raise ValueError("bank_temperature is an option of bank: set bank, too")
        return self


class VqaJob(Job):
    """Visual question answering, by a fine-tuned model."""

    task: Literal["vqa"] = Field("vqa", description="what is evaluated")
    predict: Literal["rank", "generate"] | None = Field(
        None, description="rank the list of answers, or generate text; null: as fine-tuned"
    )
    version: Version | None = Field(
        None, description="current official evaluator, or ALBEF's older one; null: as fine-tuned"
    )


class GroundingJob(Job):
    """Visual grounding of referring expressions.

    Samples need `expressions`. With `proposals`, boxes are selected among the proposals, too. Any
    model folder can be evaluated, best after fine-tuning for grounding.
    """

    task: Literal["grounding"] = Field("grounding", description="what is evaluated")
    by: Literal["gradcam", "similarity"] | None = Field(
        None,
        description="Grad-CAM of a cross-attention layer, or the cosine of tokens and patches; "
        "null: as fine-tuned, else gradcam",
    )
    layer: int | None = Field(
        None,
        description="cross-modal layer of Grad-CAM, from 0, or negative from the end; null: as "
        "fine-tuned, else the middle one",
    )
    head: int | None = Field(
        None,
        ge=1,
        description="first word pieces that make the map; null: as fine-tuned, else all",
    )
    view: View = Field("image", description="the images, patches in random order, or blank images")

    @model_validator(mode="after")
    def _check_use(self) -> GroundingJob:
        if self.by == "similarity" and self.layer is not None:
            raise ValueError("layer is an option of Grad-CAM: leave it out with by similarity")
        return self


class PointingJob(Job):
    """Pointing accuracy of words (generated corpus, COCO)."""

    task: Literal["pointing"] = Field("pointing", description="what is evaluated")
    controls: bool = Field(
        False,
        description="also point by anchors, paths and Grad-CAM, and by controls without text: the "
        "image encoder's attention, the mean box and the centre",
    )


class SwapsJob(Job):
    """Tell an arrangement of objects from its swap (generated corpus)."""

    task: Literal["swaps"] = Field("swaps", description="what is evaluated")
    view: View = Field("image", description="the images, patches in random order, or blank images")


class FoilsJob(Job):
    """Tell a caption from the same caption with one thing exchanged (any captioned images).

    Foils exchange subject and object, colours, numbers, prepositions, left and right, near and far.
    Blank images measure what the text alone tells. OUT holds every pair with its scores.
    """

    task: Literal["foils"] = Field("foils", description="what is evaluated")
    seed: int = Field(0, ge=0, description="of the choice of foils")
    view: View = Field("image", description="the images, patches in random order, or blank images")


class ZeroShotJob(Job):
    """Zero-shot classification of images by prompts.

    An image gets the class with the nearest prompts. --shards takes shard folders with the class as
    `label` of a sample, folders of class folders, and tar files of class folders. A line of
    --classes is a class name, or the label in the data, a tab and the name. A line of --templates
    is a prompt, such as "a photo of a {}."; the features of a class's prompts are averaged.

    \b
      vlp evaluate zeroshot --model runs/base/model --shards cifar10/test.tar.xz --classes c.txt
    """

    task: Literal["zeroshot"] = Field("zeroshot", description="what is evaluated")
    classes: str = Field(description="file of class names, one a line")
    templates: str | None = Field(
        None, description="file of prompts, one a line; null: a photo of a {}."
    )
    label_field: str = Field(LABEL, description="field of a sample's JSON that holds the class")
    match: int = Field(
        0,
        ge=0,
        description="classes of an image that the cross-modal encoder scores again (5 without a "
        "number on the command line)",
    )
    match_by: CombineScores = Field(
        "sum", description="the match score is added to the similarity, or replaces it"
    )

    @model_validator(mode="after")
    def _check_use(self) -> ZeroShotJob:
        if self.match_by == "match" and not self.match:
            raise ValueError("match_by is an option of re-ranking: set match, too")
        return self


# Evaluations that belong to no downstream task.
PROBES: dict[str, type[Job]] = {
    "pointing": PointingJob,
    "swaps": SwapsJob,
    "foils": FoilsJob,
    "zeroshot": ZeroShotJob,
}

# Evaluations with options of their own.
JOBS: dict[str, type[Job]] = {
    "retrieval": RetrievalJob,
    "vqa": VqaJob,
    "grounding": GroundingJob,
    **PROBES,
}
