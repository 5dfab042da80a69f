"""Dataset of a downstream task: numbered items of shard folders, made into examples and batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from vlp.config import ConfigError
from vlp.data.config import AugmentConfig
from vlp.data.features.store import shards_sha256
from vlp.data.image.decode import decode_image
from vlp.data.image.transforms import Preprocessing, TrainTransform, View, viewed
from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import BadSample, RawSample, SkippedSample
from vlp.data.shards.shard_reader import ShardIndex
from vlp.data.stream.batch import Slots
from vlp.data.stream.loader import MapDatasetConfig, OrderedData, RngFactory, indexed_data
from vlp.data.text.tokenizer import TextProcessor


class DownstreamDataConfig(MapDatasetConfig):
    """Shard folders to train on and to choose the best model by."""

    train: tuple[str, ...] = Field(
        min_length=1, description="shard folders to train on", json_schema_extra={"resume": "path"}
    )
    validation: tuple[str, ...] = Field(
        (), description="none: no model is chosen", json_schema_extra={"resume": "tolerated"}
    )
    limit: int | None = Field(None, ge=1, description="only the first so many items of `train`")
    validation_limit: int | None = Field(
        None,
        ge=1,
        description="likewise of `validation`",
        json_schema_extra={"resume": "tolerated"},
    )
    augment: AugmentConfig = Field(AugmentConfig(), description="augmentation of training images")
    view: View = Field(
        "image",
        description="what the model is shown: `shuffled` (patches in random order) and `blank` "
        "tell what it owes to places and to the image",
    )


Parts = Callable[[Annotation], int]
"""Function from an annotation to the number of items of its sample."""


class Item(NamedTuple):
    """One item: its sample, its number within the sample, and its location for messages."""

    raw: RawSample
    part: int
    where: str

    def without_images(self) -> Item:
        """Return what is left once its images are decoded."""
        return self._replace(raw=self.raw._replace(image=b"", second_image=None))


class Items:
    """Items of shard folders, in their order, by number.

    Args:
        folders: shard folders.
        parts: items of a sample; every annotation is read once to count them. A sample whose
            annotation cannot be read is one (bad) item. None: a sample is an item, nothing is read.
        limit: only the first so many items.
    """

    def __init__(
        self,
        folders: Sequence[str | Path],
        parts: Parts | None = None,
        limit: int | None = None,
    ) -> None:
        if not folders:
            raise ConfigError("no shard folder is given")
        if limit is not None and limit < 1:
            raise ConfigError(f"limit {limit}: at least one item is needed")
        self.folders = tuple(str(folder) for folder in folders)
        self.indices = [ShardIndex.open(folder) for folder in folders]
        self._shards = [
            (folder, number)
            for folder, index in enumerate(self.indices)
            for number in range(len(index.shards))
        ]
        samples = [self.indices[folder].shards[number].samples for folder, number in self._shards]
        self._first = np.concatenate([[0], np.cumsum(samples, dtype=np.int64)])
        # Where each sample's items end; without parts a sample's number is its item's.
        self._ends = None if parts is None else self._count(parts)
        total = int(self._first[-1]) if self._ends is None else int(self._ends[-1])
        if not total:
            raise ConfigError(
                f"{', '.join(self.folders)}: there is nothing to read in these shards"
            )
        self._length = total if limit is None else min(limit, total)

    def __len__(self) -> int:
        return self._length

    def read(self, number: int) -> Item:
        """Read one item.

        Raises:
            BadSample: its sample cannot be read.
            IndexError: there is no item of that number.
        """
        folder, shard, sample, part = self.place(number)
        index = self.indices[folder]
        raw = index.read(shard, sample)
        return Item(raw, part, f"{index.folder / index.shards[shard].name}, {raw.key}")

    def place(self, number: int) -> tuple[int, int, int, int]:
        """Return (folder, shard, sample, part) of an item.

        Raises:
            IndexError: there is no item of that number.
        """
        if not 0 <= number < self._length:
            raise IndexError(f"there are {self._length} items, none at {number}")
        sample, part = number, 0
        if self._ends is not None:
            sample = int(np.searchsorted(self._ends, number, side="right"))
            part = number - (int(self._ends[sample - 1]) if sample else 0)
        position = int(np.searchsorted(self._first, sample, side="right")) - 1
        return *self._shards[position], sample - int(self._first[position]), part

    def _count(self, parts: Parts) -> np.ndarray:
        counts = np.zeros(int(self._first[-1]), dtype=np.int64)
        for (folder, number), first in zip(self._shards, self._first):
            index = self.indices[folder]
            for sample in range(index.shards[number].samples):
                try:
                    counts[first + sample] = parts(index.read_annotation(number, sample))
                except BadSample:
                    counts[first + sample] = 1
        return np.cumsum(counts)


class ImagePreparation(NamedTuple):
    """Preparation of images: `train` where `rng_for` is given, else `evaluate`."""

    train: TrainTransform
    evaluate: Preprocessing
    view: View
    patch_size: int

    def __call__(
        self, images: Sequence[Image.Image], text: str, number: int, rng_for: RngFactory | None
    ) -> Tensor:
        """Make (images, 3, size, size) float32 pixels, normalised.

        Args:
            images: those of one sample.
            text: what is said of them; an image is not flipped where it speaks of sides.
            number: of the sample, which fixes the order of shuffled patches in evaluation.
            rng_for: of training.
        """
        if rng_for is None:
            pixels = [self.evaluate(image) for image in images]
            seed = number
        else:
            rng = rng_for("augment")
            pixels = [self.train(image, rng, text) for image in images]
            seed = int(rng_for("view").integers(1 << 62))
        return viewed(torch.stack(pixels), self.view, self.patch_size, seed)


def decoded(raw: RawSample, count: int, where: str) -> list[Image.Image]:
    """Decode the first `count` images (1 or 2) of a sample.

    Raises:
        BadSample: one is missing or cannot be decoded.
    """
    encoded = [raw.image, raw.second_image][:count]
    if any(image is None for image in encoded):
        raise BadSample("missing image", f"{where}: it has no second image (KEY.1.jpg)")
    return [decode_image(image, where) for image in encoded if image is not None]


def panels(image: Image.Image, count: int) -> list[Image.Image]:
    """Cut an image into `count` parts of one width, from left to right.

    Args:
        image: of any width; parts differ by a pixel where it does not divide.
        count: 1 gives the image itself.
    """
    edges = [image.width * number // count for number in range(count + 1)]
    parts = itertools.pairwise(edges)
    return [image.crop((left, 0, right, image.height)) for left, right in parts]


Example = TypeVar("Example")
Slotted = TypeVar("Slotted", bound=Slots)


class DownstreamDataset(Generic[Example, Slotted]):
    """Base of the tasks' datasets; a subclass adds `make`, `blank` and `batch`.

    Args:
        items: of shard folders.
        text: tokenizer.
        prepare: images to pixels.
    """

    def __init__(self, items: Items, text: TextProcessor, prepare: ImagePreparation) -> None:
        self.items, self.text, self.prepare = items, text, prepare

    def make(self, item: Item, number: int, rng_for: RngFactory | None = None) -> Example:
        """Make an example of the item of that number; `rng_for` augments, in training.

        Raises:
            BadSample: an image or the text cannot be used.
        """
        raise NotImplementedError

    def blank(self) -> Example:
        """Make the example that stands in a batch without a good one."""
        raise NotImplementedError

    def batch(
        self, examples: list[Example], valid: Tensor, skipped: tuple[SkippedSample, ...]
    ) -> Slotted:
        """Stack at least one example; `valid` (B,) bool."""
        raise NotImplementedError

    def require_truth(self, example: Example, item: Item) -> None:
        """Check that an example can be trained on.

        Raises:
            BadSample: it has no label or answer.
        """

    def train(self, number: int, rng_for: RngFactory) -> Example:
        """Make an example to train on.

        Raises:
            BadSample: it cannot be used, or has no label or answer.
        """
        item = self.items.read(number)
        example = self.make(item, number, rng_for)
        self.require_truth(example, item)
        return example

    def collate(self, examples: list[Example], skipped: tuple[SkippedSample, ...] = ()) -> Slotted:
        """Make a batch; without a good example it has one blank row that is not valid."""
        valid = torch.ones(len(examples), dtype=torch.bool)
        if not examples:
            examples, valid = [self.blank()], torch.zeros(1, dtype=torch.bool)
        return self.batch(examples, valid, skipped)

    def batches(self, config: DownstreamDataConfig, batch: int, seed: int) -> OrderedData:
        """Return the training batches of `batch` slots."""
        data = indexed_data(len(self.items), self.train, self.collate, config, batch, seed)
        for number, index in enumerate(self.items.indices):
            data.fingerprint[f"source {number}"] = shards_sha256(index.shards)
        data.fingerprint["vocabulary"] = self.text.sha256()
        return data
