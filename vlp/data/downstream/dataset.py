"""Dataset of a downstream task: examples and batches of the items of shard folders."""

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
from vlp.data.stream.batch import RankBatch
from vlp.data.stream.loader import MapDatasetConfig, OrderedData, RngFactory, indexed_data
from vlp.data.text.tokenizer import TextProcessor


class DownstreamDataConfig(MapDatasetConfig):
    """Shard folders to train on and to select the best checkpoint by."""

    train: tuple[str, ...] = Field(
        min_length=1, description="shard folders to train on", json_schema_extra={"resume": "path"}
    )
    validation: tuple[str, ...] = Field(
        (),
        description="shard folders to validate on; without any no best checkpoint is selected",
        json_schema_extra={"resume": "tolerated"},
    )
    limit: int | None = Field(None, ge=1, description="use the first items of `train` only")
    validation_limit: int | None = Field(
        None,
        ge=1,
        description="use the first items of `validation` only",
        json_schema_extra={"resume": "tolerated"},
    )
    augment: AugmentConfig = Field(AugmentConfig(), description="augmentation of training images")
    view: View = Field(
        "image",
        description="`shuffled` (patches in random order) and `blank` show how much the model owes "
        "to positions and to the image",
    )


class ImagePreparation(NamedTuple):
    """Preparation of a sample's images: by `train` if `rng_for` is given, else by `evaluate`."""

    train: TrainTransform
    evaluate: Preprocessing
    view: View
    patch_size: int

    def __call__(
        self, images: Sequence[Image.Image], text: str, number: int, rng_for: RngFactory | None
    ) -> Tensor:
        """Return (images, 3, size, size) float32 pixels; no flip if `text` names a side."""
        if rng_for is None:
            pixels = [self.evaluate(image) for image in images]
            seed = number  # every evaluation shuffles the patches of an item in the same way
        else:
            rng = rng_for("augment")
            pixels = [self.train(image, rng, text) for image in images]
            seed = int(rng_for("view").integers(1 << 62))
        return apply_view(torch.stack(pixels), self.view, self.patch_size, seed)


def decode_images(raw: RawSample, count: int) -> list[Image.Image]:
    """Decode the first `count` images (1 or 2) of a sample; raises BadSample."""
    images = [raw.image]
    if count == 2:
        if raw.second_image is None:
            raise BadSample("missing image", f"{raw.where}: it has no second image (KEY.1.jpg)")
        images.append(raw.second_image)
    return [decode_image(image, raw.where) for image in images]


def cut_panels(image: Image.Image, count: int) -> list[Image.Image]:
    """Cut an image into `count` parts of equal width (to a pixel), from left to right."""
    edges = [image.width * number // count for number in range(count + 1)]
    parts = itertools.pairwise(edges)
    return [image.crop((left, 0, right, image.height)) for left, right in parts]


Example = TypeVar("Example")
TaskBatch = TypeVar("TaskBatch", bound=RankBatch)


class DownstreamDataset(Generic[Example, TaskBatch]):
    """Base of the tasks' datasets; subclasses implement `make`, `blank` and `batch`."""

    def __init__(self, items: Items, text: TextProcessor, prepare: ImagePreparation) -> None:
        self.items, self.text, self.prepare = items, text, prepare

    def make(self, item: Item, number: int, rng_for: RngFactory | None = None) -> Example:
        """Return the example of item `number`, augmented with `rng_for`; raises BadSample."""
        raise NotImplementedError

    def blank(self) -> Example:
        """Return the placeholder of a batch without a good example."""
        raise NotImplementedError

    def batch(
        self, examples: list[Example], valid: Tensor, skipped: tuple[SkippedSample, ...]
    ) -> TaskBatch:
        """Stack at least one example into a batch; `valid` (B,) bool."""
        raise NotImplementedError

    def require_truth(self, example: Example, item: Item) -> None:
        """Raise BadSample for an example without label or answer, if the task needs one."""

    def training_example(self, number: int, rng_for: RngFactory) -> Example:
        """Return the augmented example of item `number`; BadSample if it lacks label or answer."""
        item = self.items.read(number)
        example = self.make(item, number, rng_for)
        self.require_truth(example, item)
        return example

    def collate(
        self, examples: list[Example], skipped: tuple[SkippedSample, ...] = ()
    ) -> TaskBatch:
        """Return a batch; without a good example it is a blank row with `valid` False."""
        valid = torch.ones(len(examples), dtype=torch.bool)
        if not examples:
            examples, valid = [self.blank()], torch.zeros(1, dtype=torch.bool)
        return self.batch(examples, valid, skipped)

    def batches(self, config: DownstreamDataConfig, batch: int, seed: int) -> OrderedData:
        """Return training batches of `batch` rows over all ranks."""
        data = indexed_data(
            len(self.items), self.training_example, self.collate, config, batch, seed
        )
        for number, index in enumerate(self.items.indices):
            data.fingerprint[f"source {number}"] = shards_sha256(index.shards)
        data.fingerprint["vocabulary"] = self.text.sha256()
        return data
