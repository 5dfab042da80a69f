"""A text and what it is to one or two pictures: SNLI-VE's hypotheses, NLVR2's statements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vlp.data.downstream.config import DownstreamDataConfig
from vlp.data.downstream.images import PicturePreparation, decoded, panels
from vlp.data.downstream.items import Item, Items
from vlp.data.pretrain.loader import OrderedData
from vlp.data.schema import Annotation
from vlp.data.shards.bad_samples import Skip
from vlp.data.shards.sample_files import BadSample
from vlp.data.stream.batch import moved
from vlp.data.stream.map_dataset import Draws, indexed_data
from vlp.data.text.tokenizer import TextProcessor, TextTokens


class ClaimKind(NamedTuple):
    """What a benchmark says of its pictures.

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


HYPOTHESES = ClaimKind("hypothesis", {"entailment": 0, "neutral": 1, "contradiction": 2})
STATEMENTS = ClaimKind("statement", {False: 0, True: 1})


class Claim(NamedTuple):
    """pixels (pictures, 3, size, size); tokens of one row; the class, None without a label."""

    pixels: Tensor
    tokens: TextTokens
    label: int | None


class ClaimBatch(NamedTuple):
    """pixels (B, pictures, 3, size, size) float32; text_ids, attention_mask, word_mask (B, N).

    labels (B,) int64; valid (B,) bool. A batch without a good sample is one grey sample that is
    not valid.
    """

    pixels: Tensor
    text_ids: Tensor
    attention_mask: Tensor
    word_mask: Tensor
    labels: Tensor
    valid: Tensor
    skipped: tuple[Skip, ...] = ()

    def to(self, device: torch.device | str) -> ClaimBatch:
        """Move every tensor to `device`."""
        return moved(self, device)


class ClaimSet:
    """The samples of some shard folders as claims.

    Args:
        items: the samples.
        kind: fields and labels.
        pictures: of each sample, 1 or 2.
        parts: into which each picture is cut, from left to right; each is read as a picture.
        text: tokenizer.
        prepare: pictures to pixels.
    """

    def __init__(
        self,
        items: Items,
        kind: ClaimKind,
        pictures: int,
        parts: int,
        text: TextProcessor,
        prepare: PicturePreparation,
    ) -> None:
        self.items, self.kind, self.pictures, self.parts = items, kind, pictures, parts
        self.text, self.prepare = text, prepare

    def make(self, item: Item, number: int, draws: Draws | None = None) -> Claim:
        """The claim of an item of that number; `draws` are those of training.

        Raises:
            BadSample: a picture, the text or the label cannot be used.
        """
        said, label = self.kind.read(item.raw.annotation, item.where)
        pictures = decoded(item.raw, self.pictures, item.where)
        shown = [part for picture in pictures for part in panels(picture, self.parts)]
        return Claim(self.prepare(shown, said, number, draws), self.text([said]), label)

    def train(self, number: int, draws: Draws) -> Claim:
        """A claim to train on; one without a label is a bad sample."""
        item = self.items.read(number)
        claim = self.make(item, number, draws)
        if claim.label is None:
            raise BadSample("unknown label", f"{item.where}: training needs a label")
        return claim

    def collate(self, claims: list[Claim], skipped: tuple[Skip, ...] = ()) -> ClaimBatch:
        """A batch of claims; those without a label have class -1."""
        valid = torch.ones(len(claims), dtype=torch.bool)
        if not claims:  # models want a row; it counts nowhere
            size = self.prepare.evaluate.image_size
            blank = torch.zeros(self.pictures * self.parts, 3, size, size)
            claims, valid = [Claim(blank, self.text([""]), 0)], torch.zeros(1, dtype=torch.bool)
        labels = [-1 if claim.label is None else claim.label for claim in claims]
        ids, attention, words = (torch.cat(rows) for rows in zip(*(one.tokens for one in claims)))
        pixels = torch.stack([claim.pixels for claim in claims])
        return ClaimBatch(pixels, ids, attention, words, torch.tensor(labels), valid, skipped)

    def batches(self, config: DownstreamDataConfig, batch: int, seed: int) -> OrderedData:
        """Training batches.

        Raises:
            ConfigError: the streams do not divide the batch.
        """
        return indexed_data(len(self.items), self.train, self.collate, config, batch, seed)
