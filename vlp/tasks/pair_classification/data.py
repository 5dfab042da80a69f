"""Pair classification: a text and one or two images, as in SNLI-VE and NLVR2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlp.data.downstream.dataset import (
    DownstreamDataset,
    ImagePreparation,
    cut_panels,
    decode_images,
)
from vlp.data.schema import Annotation, captions_of, normalised_caption
from vlp.data.shards.sample_files import BadSample, SkippedSample
from vlp.data.shards.shard_reader import Item, Items
from vlp.data.stream.batch import to_device
from vlp.data.stream.loader import RngFactory
from vlp.data.stream.rng import make_rng
from vlp.data.text.tokenizer import TextProcessor, TextTokens


class TextLabels(NamedTuple):
    """Text field of a benchmark's annotations, and its labels."""

    # Name of the annotation's field with the text.
    field: str
    # Value of the annotation's `label` -> class.
    labels: Mapping[str | bool, int]

    def read(self, annotation: Annotation, where: str) -> tuple[str, int | None]:
        """Return text and class; the class is None without a label, as in a test set.

        Raises BadSample without a text, and for an unknown label.
        """
        text, label = getattr(annotation, self.field), annotation.label
        if not (text and text.strip()):
            raise BadSample("no text", f"{where}: it has no `{self.field}`")
        if label is not None and label not in self.labels:
            names = ", ".join(dict.fromkeys(map(str, self.labels)))
            raise BadSample("unknown label", f"{where}: label {label!r} is not one of {names}")
        return text, None if label is None else self.labels[label]


SNLI_VE_LABELS = TextLabels("hypothesis", {"entailment": 0, "neutral": 1, "contradiction": 2})
# NLVR2's files have labels as strings; `Annotation` also reads the numbers 0 and 1 as strings.
_TRUTH: dict[str | bool, int] = {"False": 0, "True": 1, "false": 0, "true": 1, "0": 0, "1": 1}
NLVR2_LABELS = TextLabels("statement", {False: 0, True: 1, **_TRUTH})


class PairExample(NamedTuple):
    """A text with its images."""

    # (images, 3, size, size) float32
    pixels: Tensor
    text: str
    # Of the text, one row.
    tokens: TextTokens
    # Class; None without a label.
    label: int | None


class PairBatch(NamedTuple):
    """B texts, each with its images; if all samples are bad, one grey row that is not valid."""

    # (B, images, 3, size, size) float32
    pixels: Tensor
    # (B, N) each
    text_ids: Tensor
    attention_mask: Tensor
    word_mask: Tensor
    # (B,) int64, -1 without a label
    labels: Tensor
    # (B,) bool
    valid: Tensor
    skipped: tuple[SkippedSample, ...] = ()

    def to(self, device: torch.device | str) -> PairBatch:
        """Move every tensor to `device`."""
        return to_device(self, device)


class PairDataset(DownstreamDataset[PairExample, PairBatch]):
    """Samples of shard folders, each a text with 1 or 2 images.

    Args:
        images: number of images of a sample.
        panel_count: number of `panels` of each image; the model reads each panel as an image.
    """

    def __init__(
        self,
        items: Items,
        labels: TextLabels,
        images: int,
        panel_count: int,
        text: TextProcessor,
        prepare: ImagePreparation,
    ) -> None:
        super().__init__(items, text, prepare)
        self.labels, self.images, self.panel_count = labels, images, panel_count

    def make(self, item: Item, number: int, rng_for: RngFactory | None = None) -> PairExample:
        """Make the example of item `number`; `rng_for` draws the augmentation of training."""
        text, label = self.labels.read(item.raw.annotation, item.where)
        images = decode_images(item.raw, self.images)
        parts = [panel for image in images for panel in cut_panels(image, self.panel_count)]
        pixels = self.prepare(parts, text, number, rng_for)
        return PairExample(pixels, text, self.text([text]), label)

    def require_truth(self, example: PairExample, item: Item) -> None:
        """Require a label."""
        if example.label is None:
            raise BadSample("unknown label", f"{item.where}: training needs a label")

    def blank(self) -> PairExample:
        """Make grey images with an empty text."""
        size = self.prepare.evaluate.image_size
        pixels = torch.zeros(self.images * self.panel_count, 3, size, size)
        return PairExample(pixels, "", self.text([""]), 0)

    def batch(
        self, examples: list[PairExample], valid: Tensor, skipped: tuple[SkippedSample, ...]
    ) -> PairBatch:
        """Stack examples; `valid` is (B,) bool."""
        labels = [-1 if example.label is None else example.label for example in examples]
        tokens = TextTokens(*map(torch.cat, zip(*(example.tokens for example in examples))))
        pixels = torch.stack([example.pixels for example in examples])
        return PairBatch(pixels, *tokens, torch.tensor(labels), valid, skipped)


FIRST, SECOND, NEITHER = range(3)


class AssignmentDataset(PairDataset):
    """Captions with two images; FIRST, SECOND or NEITHER of them is the caption's image."""

    def __init__(self, items: Items, text: TextProcessor, prepare: ImagePreparation) -> None:
        super().__init__(items, TextLabels("caption", {}), 2, 1, text, prepare)

    def make(self, item: Item, number: int, rng_for: RngFactory | None = None) -> PairExample:
        """Draw a caption of `item`, a class, and other images to match; raises BadSample."""
        rng = rng_for("assignment") if rng_for else make_rng(0, 0, number, "assignment")
        captions = captions_of(item.raw.annotation)
        if not captions:
            raise BadSample("no text", f"{item.where}: it has no caption")
        text = captions[int(rng.integers(len(captions)))]
        label = int(rng.integers(3))  # FIRST, SECOND or NEITHER
        others: list[Item] = []
        for _ in range(2 if label == NEITHER else 1):
            others.append(self._draw_other([item, *others], text, rng))
        pairs = {FIRST: [item, *others], SECOND: [*others, item], NEITHER: others}
        images = [decode_images(image_item.raw, 1)[0] for image_item in pairs[label]]
        pixels = self.prepare(images, text, number, rng_for)
        return PairExample(pixels, text, self.text([text]), label)

    def _draw_other(self, items: list[Item], text: str, rng: np.random.Generator) -> Item:
        """Draw a sample with another image than the items and without a caption equal to `text`."""
        images = {name for item in items for name in _image_names(item)}
        caption = normalised_caption(text)
        for _ in range(8):
            other = self.items.read(int(rng.integers(len(self.items))))
            captions = map(normalised_caption, captions_of(other.raw.annotation))
            if images.isdisjoint(_image_names(other)) and caption not in captions:
                return other
        raise BadSample(
            "no other image",
            f"{items[0].where}: 8 draws found no image that differs and has another caption",
        )


def _image_names(item: Item) -> tuple[str, str]:
    """Return the annotated name of an image and its hash; equal images share at least one."""
    return item.raw.image_name, item.raw.image_digest
