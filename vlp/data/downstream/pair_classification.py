"""A text and what it is to one or two images: SNLI-VE's hypotheses, NLVR2's statements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vlp.data.downstream.config import DownstreamDataConfig
from vlp.data.downstream.images import ImagePreparation, decoded, panels
from vlp.data.downstream.items import Item, Items
from vlp.data.pretrain.loader import OrderedData
from vlp.data.schema import Annotation
from vlp.data.shards.bad_samples import SkippedSample
from vlp.data.shards.sample_files import BadSample
from vlp.data.stream.batch import moved
from vlp.data.stream.map_dataset import RngFactory, indexed_data
from vlp.data.text.tokenizer import TextProcessor, TextTokens


class TextLabels(NamedTuple):
    """What a benchmark says of its images.

    text: the annotation's field with the text. labels: value of the annotation's `label` -> class.
    """

    text: str
    labels: Mapping[str | bool, int]

    def read(self, annotation: Annotation, where: str) -> tuple[str, int | None]:
        """Text and class; the class is None where the annotation has no label, as in a test set.

        Raises:
            BadSample: there is no text, or the label is unknown.
        """
        text, label = getattr(annotation, self.text), annotation.label
        if not text:
            raise BadSample("no text", f"{where}: it has no `{self.text}`")
        if label is not None and label not in self.labels:
            known = ", ".join(str(name) for name in self.labels)
            raise BadSample("unknown label", f"{where}: label {label!r} is none of {known}")
        return text, None if label is None else self.labels[label]


HYPOTHESES = TextLabels("hypothesis", {"entailment": 0, "neutral": 1, "contradiction": 2})
STATEMENTS = TextLabels("statement", {False: 0, True: 1})


class PairExample(NamedTuple):
    """pixels (images, 3, size, size); tokens of one row; the class, None without a label."""

    pixels: Tensor
    tokens: TextTokens
    label: int | None


class PairBatch(NamedTuple):
    """pixels (B, images, 3, size, size) float32; text_ids, attention_mask, word_mask (B, N).

    labels (B,) int64; valid (B,) bool. A batch without a good sample is one grey sample that is
    not valid.
    """

    pixels: Tensor
    text_ids: Tensor
    attention_mask: Tensor
    word_mask: Tensor
    labels: Tensor
    valid: Tensor
    skipped: tuple[SkippedSample, ...] = ()

    def to(self, device: torch.device | str) -> PairBatch:
        """Move every tensor to `device`."""
        return moved(self, device)


class PairDataset:
    """The samples of some shard folders as claims.

    Args:
        items: the samples.
        kind: fields and labels.
        images: of each sample, 1 or 2.
        parts: into which each image is cut, from left to right; each is read as an image.
        text: tokenizer.
        prepare: images to pixels.
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
        self.items, self.kind, self.images, self.parts = items, kind, images, parts
        self.text, self.prepare = text, prepare

    def make(self, item: Item, number: int, rng_for: RngFactory | None = None) -> PairExample:
        """The claim of an item of that number; `rng_for` are those of training.

        Raises:
            BadSample: an image, the text or the label cannot be used.
        """
        said, label = self.kind.read(item.raw.annotation, item.where)
        images = decoded(item.raw, self.images, item.where)
        shown = [part for image in images for part in panels(image, self.parts)]
        return PairExample(self.prepare(shown, said, number, rng_for), self.text([said]), label)

    def train(self, number: int, rng_for: RngFactory) -> PairExample:
        """A claim to train on; one without a label is a bad sample."""
        item = self.items.read(number)
        claim = self.make(item, number, rng_for)
        if claim.label is None:
            raise BadSample("unknown label", f"{item.where}: training needs a label")
        return claim

    def collate(
        self, claims: list[PairExample], skipped: tuple[SkippedSample, ...] = ()
    ) -> PairBatch:
        """A batch of claims; those without a label have class -1."""
        valid = torch.ones(len(claims), dtype=torch.bool)
        if not claims:  # models want a row; it counts nowhere
            size = self.prepare.evaluate.image_size
            blank = torch.zeros(self.images * self.parts, 3, size, size)
            claims, valid = (
                [PairExample(blank, self.text([""]), 0)],
                torch.zeros(1, dtype=torch.bool),
            )
        labels = [-1 if claim.label is None else claim.label for claim in claims]
        ids, attention, words = (torch.cat(rows) for rows in zip(*(one.tokens for one in claims)))
        pixels = torch.stack([claim.pixels for claim in claims])
        return PairBatch(pixels, ids, attention, words, torch.tensor(labels), valid, skipped)

    def batches(self, config: DownstreamDataConfig, batch: int, seed: int) -> OrderedData:
        """Training batches.

        Raises:
            ConfigError: the streams do not divide the batch.
        """
        return indexed_data(len(self.items), self.train, self.collate, config, batch, seed)
