"""Pictures as the numbers of their pixels, for models of their exact likelihood."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from pydantic import Field
from torch import Tensor

from vlp.data.pretrain.loader import OrderedData
from vlp.data.shards.bad_samples import Skip
from vlp.data.shards.sample_files import BadSample
from vlp.data.stream.batch import moved
from vlp.data.stream.map_dataset import Draws, OrderConfig, indexed_data
from vlp.data.vision.labelled_images import LabelledPictures, some_of

CHANNELS = 3
LEVELS = 256


class PixelDataConfig(OrderConfig):
    """Pictures whose pixels are modelled: what `open_labelled` opens; classes are not used."""

    train: str
    test: str
    classes: tuple[str, ...] | None = Field(None, description="only shards need them")
    limit: int | None = Field(None, ge=1, description="pictures of `train`, drawn once")
    image_size: int = Field(64, ge=1, description="pixels; larger pictures are made smaller")
    mirror: bool = Field(False, description="left and right, every other time, in training")


class PixelBatch(NamedTuple):
    """values (B, size, size, 3) int64, 0 to 255, red, green, blue; valid (B,) bool.

    Flattened, a picture is in the paper's order: raster scan, red-green-blue.
    """

    values: Tensor
    valid: Tensor
    skipped: tuple[Skip, ...] = ()

    def to(self, device: torch.device | str) -> PixelBatch:
        """Move every tensor to `device`."""
        return moved(self, device)


def pixel_values(picture: Image.Image, size: int, where: str) -> Tensor:
    """The pixels of a picture's largest square in its middle: (size, size, 3) uint8.

    A larger picture is made smaller by the mean of each pixel's area, as the ImageNet-64 that such
    models are compared on was made; at `size` nothing is changed.

    Raises:
        BadSample: a picture that is smaller. Pixels made up by enlarging would be easy to predict.
    """
    side = min(picture.size)
    if side < size:
        raise BadSample("picture too small", f"{where} ({picture.width} x {picture.height})")
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    box = (left, top, left + side, top + side)
    if picture.size != (size, size):
        picture = picture.resize((size, size), Image.Resampling.BOX, box=box)
    return torch.from_numpy(np.array(picture))


class PixelSamples:
    """Reads one training picture.

    Args:
        pictures: where they come from.
        config: size and mirroring.
    """

    def __init__(
        self,
        pictures: LabelledPictures,
        config: PixelDataConfig,
    ) -> None:
        self.pictures, self.config = pictures, config

    def __len__(self) -> int:
        return len(self.pictures)

    def __call__(self, number: int, draws: Draws) -> Tensor:
        """Pixels (size, size, 3) uint8."""
        picture, _, where = self.pictures.read(number)
        if self.config.mirror and draws("mirror").random() < 0.5:
            picture = ImageOps.mirror(picture)
        return pixel_values(picture, self.config.image_size, where)


def pixel_data(
    pictures: LabelledPictures, config: PixelDataConfig, batch: int, seed: int
) -> OrderedData:
    """Training batches of `pictures`, those of `config.train`.

    Raises:
        ConfigError: `limit` or the batch does not fit.
    """
    pictures = some_of(pictures, config.limit, config.train)
    samples = PixelSamples(pictures, config)
    collate = partial(_collate, config.image_size)
    return indexed_data(len(samples), samples, collate, config, batch, seed)


def _collate(size: int, samples: list[Tensor], skipped: tuple[Skip, ...]) -> PixelBatch:
    values = torch.stack(samples) if samples else torch.zeros(0, size, size, CHANNELS)
    return PixelBatch(values.long(), torch.ones(len(samples), dtype=torch.bool), skipped)
