"""Schema of a sample's annotation, `KEY.json` in a shard."""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool

SCHEMA_VERSION = 1

TextKind = Literal["captions", "expressions"]

# Longer captions are cut: models read some dozens of words, and a tokenizer takes seconds and
# hundreds of megabytes for a text of a megabyte.
MAX_CAPTION = 10_000  # characters


def _require_size(box: list[float]) -> list[float]:
    if box[2] < 0 or box[3] < 0:
        raise ValueError(f"a box is [x, y, width, height], but {box} has a negative side")
    return box


# [x, y, width, height] in pixels; may overhang the image, as in some published annotations.
Box = Annotated[
    list[Annotated[float, Field(allow_inf_nan=False)]],
    Field(min_length=4, max_length=4),
    AfterValidator(_require_size),
]


class _Part(BaseModel):
    # Rewriting a shard keeps unknown keys: img2dataset and other tools add url, width, exif, ...
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
    """A referring expression; `box` is [x, y, width, height] in pixels of the stored image."""

    id: str
    text: str
    box: Box


class Word(_Part):
    """A word of a caption with the box that it names; it may also name one of `others`."""

    # Strict: an index converted from another type could point at another word.
    model_config = ConfigDict(strict=True, coerce_numbers_to_str=False)

    caption: int = Field(ge=0)
    # Among the caption's words and punctuation marks, as BERT splits them.
    index: int = Field(ge=0)
    word: str
    # `colour`, `shape`, `object`, or `objects` if several objects have the name.
    kind: str
    box: Annotated[Box, Field(strict=False)]
    others: list[Annotated[Box, Field(strict=False)]] | None = None

    @property
    def boxes(self) -> tuple[tuple[float, ...], ...]:
        """All boxes that the word may name."""
        return tuple(tuple(box) for box in (self.box, *(self.others or ())))


class Annotation(_Part):
    """Annotation of one image (or pair of images); every field is optional."""

    version: int = Field(default=SCHEMA_VERSION, ge=1, le=SCHEMA_VERSION)
    caption: str | None = None
    captions: list[str] | None = None
    # Samples with the same `source` and `image_id` show the same image.
    source: str | None = None
    image_id: str | None = None
    premise: str | None = None
    hypothesis: str | None = None
    statement: str | None = None
    label: StrictBool | str | None = None  # strict, so that class 0 becomes "0" and not False
    questions: list[Question] | None = None
    expressions: list[Expression] | None = None
    # [x, y, width, height] in pixels of the upright stored image.
    boxes: list[Box] | None = None
    proposals: list[Box] | None = None
    words: list[Word] | None = None
    scene: dict[str, Any] | None = None

    def to_json(self) -> bytes:
        """Return UTF-8 JSON without unset fields; equal annotations give equal bytes."""
        return self.model_dump_json(exclude_none=True).encode()


def texts_of(annotation: Annotation, kind: TextKind = "captions") -> list[str]:
    """Return an image's captions, or its non-empty referring expressions."""
    if kind == "captions":
        return captions_of(annotation)
    texts = (expression.text.strip() for expression in annotation.expressions or ())
    return [text for text in texts if text]


def all_texts_of(annotation: Annotation) -> list[str]:
    """Return all texts of an image: captions, statements, questions, answers and expressions."""
    sentences = (annotation.premise, annotation.hypothesis, annotation.statement)
    questions = annotation.questions or ()
    texts: list[str] = [
        *captions_of(annotation),
        *(sentence for sentence in sentences if sentence),
        *(question.question for question in questions),
        *(answer.answer for question in questions for answer in question.answers),
        *(expression.text for expression in annotation.expressions or ()),
    ]
    return [stripped for text in texts if (stripped := text.strip()[:MAX_CAPTION])]


def captions_of(annotation: Annotation) -> list[str]:
    """Return the non-empty `captions`, else the `caption`, stripped and cut to MAX_CAPTION."""
    texts = _raw_captions(annotation)
    return [texts[index].strip()[:MAX_CAPTION] for index in caption_indices(annotation)]


@cache
def _punctuation_table() -> dict[int, int | None]:
    table = str.maketrans("-/", "  ", ",.'!?\"()*#:;~")  # as ALBEF prepares captions
    for code in range(128, 1 << 16):
        category = unicodedata.category(chr(code))
        # Invisible characters and typographic quotes go; other punctuation separates words.
        if category in ("Cf", "Pi", "Pf"):
            table[code] = None
        elif category[0] == "P":
            table[code] = ord(" ")
    return table


def normalised_caption(text: str) -> str:
    """Return a caption in lower case without punctuation and repeated spaces, for comparison."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(plain.translate(_punctuation_table()).split()) or plain


def caption_indices(annotation: Annotation) -> list[int]:
    """Return the indices of non-empty captions in the annotation, in the order of `captions_of`."""
    return [index for index, text in enumerate(_raw_captions(annotation)) if text.strip()]


def _raw_captions(annotation: Annotation) -> list[str]:
    return annotation.captions or ([annotation.caption] if annotation.caption else [])
