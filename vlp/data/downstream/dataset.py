"""Dataset of a downstream task: numbered items of shard folders, made into examples and batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from vlp.data.config import AugmentConfig
from vlp.data.features.store import shards_sha256
from vlp.data.image.decode import decode_image
from vlp.data.image.transforms import Preprocessing, TrainTransform, View, apply_view
from vlp.data.shards.sample_files import BadSample, RawSample, SkippedSample
from vlp.data.shards.shard_reader import Item, Items
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


class ImagePreparation(NamedTuple):
    """Preparation of a sample's images: `train` where `rng_for` is given, else `evaluate`."""

    train: TrainTransform
    evaluate: Preprocessing
    view: View
    patch_size: int

    def __call__(
        self, images: Sequence[Image.Image], text: str, number: int, rng_for: RngFactory | None
    ) -> Tensor:
        """Return (images, 3, size, size) float32 pixels, not flipped where `text` names a side."""
        if rng_for is None:
            pixels = [self.evaluate(image) for image in images]
            # Shuffled patches of a sample have the same order in every evaluation.
            seed = number
        else:
            rng = rng_for("augment")
            pixels = [self.train(image, rng, text) for image in images]
            seed = int(rng_for("view").integers(1 << 62))
        return apply_view(torch.stack(pixels), self.view, self.patch_size, seed)


def decode_images(raw: RawSample, count: int) -> list[Image.Image]:
    """Decode the first `count` images (1 or 2) of a sample; raises BadSample."""
    encoded = [raw.image, raw.second_image][:count]
    if any(image is None for image in encoded):
        raise BadSample("missing image", f"{raw.where}: it has no second image (KEY.1.jpg)")
    return [decode_image(image, raw.where) for image in encoded if image is not None]


def panels(image: Image.Image, count: int) -> list[Image.Image]:
    """Cut an image into `count` parts of one width, give or take a pixel, from left to right."""
    edges = [image.width * number // count for number in range(count + 1)]
    parts = itertools.pairwise(edges)
    return [image.crop((left, 0, right, image.height)) for left, right in parts]


Example = TypeVar("Example")
Slotted = TypeVar("Slotted", bound=Slots)


class DownstreamDataset(Generic[Example, Slotted]):
    """Base of the tasks' datasets; a subclass adds `make`, `blank` and `batch`."""

    def __init__(self, items: Items, text: TextProcessor, prepare: ImagePreparation) -> None:
        self.items, self.text, self.prepare = items, text, prepare

    def make(self, item: Item, number: int, rng_for: RngFactory | None = None) -> Example:
        """Make an example of the item of that number; `rng_for` augments; raises BadSample."""
        raise NotImplementedError

    def blank(self) -> Example:
        """Make the placeholder of a batch without a good example."""
        raise NotImplementedError

    def batch(
        self, examples: list[Example], valid: Tensor, skipped: tuple[SkippedSample, ...]
    ) -> Slotted:
        """Stack at least one example; `valid` (B,) bool."""
        raise NotImplementedError

    def require_truth(self, example: Example, item: Item) -> None:
        """Raise BadSample for an example without label or answer."""

    def train(self, number: int, rng_for: RngFactory) -> Example:
        """Make an example to train on; raises BadSample."""
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
