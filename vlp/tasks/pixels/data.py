"""Images as the numbers of their pixels, for models of their exact likelihood."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from pydantic import Field
from torch import Tensor

from vlp.data.labelled_images import LabelledImages, subset
from vlp.data.shards.sample_files import BadSample, SkippedSample
from vlp.data.stream.batch import to_device
from vlp.data.stream.loader import MapDatasetConfig, OrderedData, RngFactory, indexed_data

CHANNELS = 3


class PixelDataConfig(MapDatasetConfig):
    """Images for pixel modelling, from any source of `open_labelled`; classes are ignored."""

    train: str = Field(
        description="images to train on: a tar file, a folder of class folders, or shards with "
        "labels",
        json_schema_extra={"resume": "path"},
    )
    test: str = Field(
        description="images to evaluate on, in any of the forms of `train`",
        json_schema_extra={"resume": "tolerated"},
    )
    classes: tuple[str, ...] | None = Field(None, description="only shards need them")
    limit: int | None = Field(None, ge=1, description="images of `train`, drawn once")
    image_size: int = Field(64, ge=1, description="pixels; larger images are made smaller")
    hflip: bool = Field(False, description="left and right, every other time, in training")


class PixelBatch(NamedTuple):
    """values (B, size, size, 3) int64 in 0..255, flattened as in the paper; valid (B,) bool."""

    values: Tensor
    valid: Tensor
    skipped: tuple[SkippedSample, ...] = ()

    def to(self, device: torch.device | str) -> PixelBatch:
        """Move every tensor to `device`."""
        return to_device(self, device)


def pixel_values(image: Image.Image, size: int, where: str) -> Tensor:
    """Return the pixels of an image's largest central square: (size, size, 3) uint8.

    A larger image is reduced by the mean over each pixel's area, as ImageNet-64 was.
    """
    side = min(image.size)
    if side < size:
        raise BadSample("image too small", f"{where} ({image.width} x {image.height})")
    left, top = (image.width - side) // 2, (image.height - side) // 2
    box = (left, top, left + side, top + side)
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BOX, box=box)
    return torch.from_numpy(np.array(image))


class PixelSamples:
    """Reads one training image."""

    def __init__(self, images: LabelledImages, config: PixelDataConfig) -> None:
        self.images, self.config = images, config

    def __len__(self) -> int:
        return len(self.images)

    def __call__(self, number: int, rng_for: RngFactory) -> Tensor:
        """Return the pixels (size, size, 3) uint8."""
        image, _, where, *_ = self.images.read(number)
        if self.config.hflip and rng_for("mirror").random() < 0.5:
            image = ImageOps.mirror(image)
        return pixel_values(image, self.config.image_size, where)


def pixel_data(
    images: LabelledImages, config: PixelDataConfig, batch: int, seed: int
) -> OrderedData:
    """Return the training batches of `images` by the settings `config.train`."""
    images = subset(images, config.limit, config.train)
    samples = PixelSamples(images, config)
    collate = partial(_collate, config.image_size)
    return indexed_data(len(samples), samples, collate, config, batch, seed)


def _collate(size: int, samples: list[Tensor], skipped: tuple[SkippedSample, ...]) -> PixelBatch:
    values = torch.stack(samples) if samples else torch.zeros(0, size, size, CHANNELS)
    return PixelBatch(values.long(), torch.ones(len(samples), dtype=torch.bool), skipped)
