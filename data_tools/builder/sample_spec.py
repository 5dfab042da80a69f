"""Requests of a converter: samples to be made, and rows that make none."""

from __future__ import annotations

from typing import NamedTuple

from vlp.data.schema import Annotation, captions_of


class SampleSpec(NamedTuple):
    """One sample to be made.

    Args:
        key: of the sample: unique, no dots or slashes.
        images: one file name, or two for paired samples; found through `Originals`.
        annotation: what is known about it; boxes in pixels of `size`.
        size: width and height of the image that the boxes were drawn on; None: of the original,
            as it is found. Boxes are scaled to the image that is stored.
    """

    key: str
    images: tuple[str, ...]
    annotation: Annotation
    size: tuple[int, int] | None = None


class Refused(NamedTuple):
    """Something of the raw data that makes no sample, counted by kind; `id` tells which it is."""

    kind: str
    id: str


def has_text(annotation: Annotation) -> bool:
    """Return whether there is anything to learn: a text of any kind, a label or a box."""
    return bool(captions_of(annotation)) or any(
        part not in (None, "", [])
        for part in (
            annotation.hypothesis,
            annotation.statement,
            annotation.label,
            annotation.questions,
            annotation.expressions,
            annotation.boxes,
        )
    )
