"""Pair classification: a text and one or two images, as in SNLI-VE and NLVR2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlp.data.downstream.dataset import DownstreamDataset, ImagePreparation, decode_images, panels
from vlp.data.schema import Annotation, captions_of
from vlp.data.shards.sample_files import BadSample, SkippedSample
from vlp.data.shards.shard_reader import Item, Items
from vlp.data.stream.batch import to_device
from vlp.data.stream.loader import RngFactory
from vlp.data.stream.rng import make_rng
from vlp.data.text.tokenizer import TextProcessor, TextTokens


class TextLabels(NamedTuple):
    """Fields of a benchmark's annotations."""

    # The annotation's field with the text.
    text: str
    # Value of the annotation's `label` -> class.
    labels: Mapping[str | bool, int]

    def read(self, annotation: Annotation, where: str) -> tuple[str, int | None]:
        """Return text and class; the class is None where there is no label, as in a test set."""
        text, label = getattr(annotation, self.text), annotation.label
        if not (text and text.strip()):
            raise BadSample("no text", f"{where}: it has no `{self.text}`")
        if label is not None and label not in self.labels:
            names = ", ".join(dict.fromkeys(map(str, self.labels)))
            raise BadSample("unknown label", f"{where}: label {label!r} is none of {names}")
        return text, None if label is None else self.labels[label]


SNLI_VE_LABELS = TextLabels("hypothesis", {"entailment": 0, "neutral": 1, "contradiction": 2})
# NLVR2's own files spell labels as texts; numbers become texts when they are read.
_TRUTH: dict[str | bool, int] = {"False": 0, "True": 1, "false": 0, "true": 1, "0": 0, "1": 1}
NLVR2_LABELS = TextLabels("statement", {False: 0, True: 1, **_TRUTH})


class PairExample(NamedTuple):
    """pixels (images, 3, size, size); tokens of one row; the class, None without a label."""

    pixels: Tensor
    tokens: TextTokens
    label: int | None


class PairBatch(NamedTuple):
    """B texts, each with its images; one grey sample that is not valid if all are bad."""

    # (B, images, 3, size, size) float32
    pixels: Tensor
    # (B, N) each
    text_ids: Tensor
    attention_mask: Tensor
    word_mask: Tensor
    # (B,) int64
    labels: Tensor
    # (B,) bool
    valid: Tensor
    skipped: tuple[SkippedSample, ...] = ()

    def to(self, device: torch.device | str) -> PairBatch:
        """Move every tensor to `device`."""
        return to_device(self, device)


class PairDataset(DownstreamDataset[PairExample, PairBatch]):
    """Samples of shard folders, a text with 1 or 2 `images` each.

    Args:
        parts: equal cuts of each image from left to right, each read as an image.
    """

    def __init__(
        self,
        items: Items,
        kind: TextLabels,
        images: int,
        parts: int,
        text: TextProcessor,
        prepare: ImagePreparation,
    ) -> None:
        super().__init__(items, text, prepare)
        self.kind, self.images, self.parts = kind, images, parts

    def make(self, item: Item, number: int, rng_for: RngFactory | None = None) -> PairExample:
        """Make the example of an item; `rng_for` augments, in training."""
        text, label = self.kind.read(item.raw.annotation, item.where)
        images = decode_images(item.raw, self.images)
        parts = [part for image in images for part in panels(image, self.parts)]
        return PairExample(self.prepare(parts, text, number, rng_for), self.text([text]), label)

    def require_truth(self, example: PairExample, item: Item) -> None:
        """Check that there is a label."""
        if example.label is None:
            raise BadSample("unknown label", f"{item.where}: training needs a label")

    def blank(self) -> PairExample:
        """Make grey images with an empty text."""
        size = self.prepare.evaluate.image_size
        pixels = torch.zeros(self.images * self.parts, 3, size, size)
        return PairExample(pixels, self.text([""]), 0)

    def batch(
        self, examples: list[PairExample], valid: Tensor, skipped: tuple[SkippedSample, ...]
    ) -> PairBatch:
        """Stack examples; those without a label have class -1. `valid` is (B,)."""
        labels = [-1 if example.label is None else example.label for example in examples]
        tokens = [example.tokens for example in examples]
        ids, attention, words = (torch.cat(rows) for rows in zip(*tokens))
        pixels = torch.stack([example.pixels for example in examples])
        return PairBatch(pixels, ids, attention, words, torch.tensor(labels), valid, skipped)


FIRST, SECOND, NEITHER = range(3)
_UNUSED = TextLabels("caption", {})


class AssignmentDataset(PairDataset):
    """Captioned samples with images of other samples; the class is the caption's image."""

    def __init__(self, items: Items, text: TextProcessor, prepare: ImagePreparation) -> None:
        super().__init__(items, _UNUSED, 2, 1, text, prepare)

    def make(self, item: Item, number: int, rng_for: RngFactory | None = None) -> PairExample:
        """Make an example of the caption of `item`, its image first, second or absent."""
        rng = rng_for("assignment") if rng_for else make_rng(0, 0, number, "assignment")
        captions = captions_of(item.raw.annotation)
        if not captions:
            raise BadSample("no text", f"{item.where}: it has no caption")
        text = captions[int(rng.integers(len(captions)))]
        label = int(rng.integers(3))
        others: list[Item] = []
        for _ in range(2 if label == NEITHER else 1):
            others.append(self._other([item, *others], rng))
        items = [item, *others] if label == FIRST else [*others, item]
        images = [decode_images(shown.raw, 1)[0] for shown in items[:2]]
        return PairExample(self.prepare(images, text, number, rng_for), self.text([text]), label)

    def _other(self, items: list[Item], rng: np.random.Generator) -> Item:
        """Draw a sample of another image than some items, as far as the annotations tell."""
        images = [_image(item) for item in items]
        for _ in range(8):
            other = self.items.read(int(rng.integers(len(self.items))))
            if _image(other) not in images:
                return other
        raise BadSample("no text", f"{items[0].where}: no other image was drawn beside it")


def _image(item: Item) -> tuple[str | None, str]:
    annotation = item.raw.annotation
    if annotation.image_id is None:
        return None, item.where
    return annotation.source, annotation.image_id
