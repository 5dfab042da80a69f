"""Images as integer pixel values, for models of their exact likelihood."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from pydantic import Field
from torch import Tensor

from vlp.data.labelled_images import LabelledImages
from vlp.data.shards.sample_files import BadSample, SkippedSample
from vlp.data.stream.batch import to_device
from vlp.data.stream.loader import LabelledImagesConfig, RngFactory

CHANNELS = 3


class PixelDataConfig(LabelledImagesConfig):
    """Images for pixel modelling; their classes are ignored."""

    image_size: int = Field(64, ge=1, description="side in pixels; larger images are reduced")
    hflip: bool = Field(False, description="horizontal flip with probability 0.5 in training")


class PixelBatch(NamedTuple):
    """B images; 0 rows if all samples are bad."""

    # (B, size, size, 3) int64, 0 to 255
    values: Tensor
    # (B,) bool
    valid: Tensor
    skipped: tuple[SkippedSample, ...] = ()

    def to(self, device: torch.device | str) -> PixelBatch:
        """Move every tensor to `device`."""
        return to_device(self, device)


def pixel_values(image: Image.Image, size: int, where: str) -> Tensor:
    """Return the largest central square of an image, reduced to (size, size, 3) uint8.

    Box filtering, as in ImageNet-64. Raises BadSample for an image smaller than `size`; `where` is
    its location for the message.
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
    """Training samples: pixels of images, flipped at random if configured."""

    def __init__(self, images: LabelledImages, config: PixelDataConfig) -> None:
        self.images, self.config = images, config

    def __call__(self, number: int, rng_for: RngFactory) -> Tensor:
        """Return the pixels (size, size, 3) uint8 of image `number`; raises BadSample."""
        sample = self.images.read(number)
        image = sample.image
        if self.config.hflip and rng_for("mirror").random() < 0.5:
            image = ImageOps.mirror(image)
        return pixel_values(image, self.config.image_size, sample.where)


def collate_pixels(
    size: int, samples: list[Tensor], skipped: tuple[SkippedSample, ...]
) -> PixelBatch:
    """Return a batch of samples, which may be empty; `size` is the configuration's."""
    values = torch.stack(samples) if samples else torch.zeros(0, size, size, CHANNELS)
    return PixelBatch(values.long(), torch.ones(len(samples), dtype=torch.bool), skipped)
