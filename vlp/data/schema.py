"""The JSON of one sample, `KEY.json` of a shard: which fields there are and what they hold."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1

Box = Annotated[list[float], Field(min_length=4, max_length=4)]


class _Part(BaseModel):
    # Unknown keys stay: img2dataset and other tools write many of their own (url, width, exif...),
    # and a shard must survive being read and written again.
    model_config = ConfigDict(extra="allow", frozen=True, coerce_numbers_to_str=True)


class Answer(_Part):
    """One answer to a question and how many people gave it."""

    answer: str
    count: int = 1


class Question(_Part):
    """A VQA question with its answers."""

    id: str
    question: str
    answers: list[Answer] = []


class Expression(_Part):
    """A referring expression; `box` is [x, y, width, height] in pixels of the stored picture."""

    id: str
    text: str
    box: Box


class Annotation(_Part):
    """What is known about one picture (or pair of pictures); every field is optional.

    Boxes are [x, y, width, height] in pixels of the stored picture. `source` and `image_id` name
    the picture: two samples with the same pair show the same picture.
    """

    version: int = Field(default=SCHEMA_VERSION, ge=1, le=SCHEMA_VERSION)
    caption: str | None = None
    captions: list[str] | None = None
    source: str | None = None
    image_id: str | None = None
    premise: str | None = None
    hypothesis: str | None = None
    statement: str | None = None
    label: bool | str | None = None
    questions: list[Question] | None = None
    expressions: list[Expression] | None = None
    boxes: list[Box] | None = None
    proposals: list[Box] | None = None
    scene: dict[str, Any] | None = None

    def to_json(self) -> bytes:
        """UTF-8 JSON without the fields that are not set; equal annotations give equal bytes."""
        return self.model_dump_json(exclude_none=True).encode()


def captions_of(annotation: Annotation) -> list[str]:
    """The captions to train and evaluate on: `captions`, else `caption`, else none.

    White space around a caption is dropped, and a caption of nothing else does not count.
    """
    texts = annotation.captions or ([annotation.caption] if annotation.caption else [])
    return [stripped for text in texts if (stripped := text.strip())]
