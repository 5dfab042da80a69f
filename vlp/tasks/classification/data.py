"""Images and classes as batches, with the augmentation of the papers' recipes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from pydantic import Field
from torch import Tensor

from vlp.config import Config, ConfigError
from vlp.data.config import ChannelDeviations, ChannelMeans, CropScale
from vlp.data.image.transforms import Preprocessing, random_crop
from vlp.data.labelled_images import LabelledImages, subset
from vlp.data.shards.sample_files import SkippedSample
from vlp.data.stream.batch import to_device
from vlp.data.stream.loader import MapDatasetConfig, OrderedData, RngFactory, indexed_data


class ImageAugmentConfig(Config):
    """Augmentation of a training image, in this order."""

    crop_scale: CropScale = Field(
        (1.0, 1.0), description="share of the area of a random crop, resized; 1 is the whole"
    )
    shift: int = Field(0, ge=0, description="pixels that it is moved by at most, black around it")
    hflip: bool = Field(True, description="left and right, every other time")
    policy: str | None = Field(
        None, description="timm's AutoAugment policy, such as rand-m9-mstd0.5-inc1"
    )
    erasing: float = Field(0.0, ge=0, le=1, description="probability of a random erased box")


class LabelledDataConfig(MapDatasetConfig):
    """Images of classes: a tar file, a folder of class folders, or shards with labels."""

    train: str = Field(
        description="images to train on: a tar file, a folder of class folders, or shards with "
        "labels",
        json_schema_extra={"resume": "path"},
    )
    test: str = Field(
        description="images to evaluate on, in any of the forms of `train`",
        json_schema_extra={"resume": "tolerated"},
    )
    classes: tuple[str, ...] | None = Field(
        None, min_length=1, description="class names in order; shards need them, others may have"
    )
    limit: int | None = Field(None, ge=1, description="images of `train`, drawn once")
    image_size: int = Field(224, ge=1, description="side of the images in pixels")
    mean: ChannelMeans = Field(
        (0.485, 0.456, 0.406),
        description="per channel (R, G, B), of levels in [0, 1]; it is subtracted",
    )
    std: ChannelDeviations = Field(
        (0.229, 0.224, 0.225),
        description="per channel (R, G, B), of levels in [0, 1]; the rest is divided by it",
    )
    augment: ImageAugmentConfig = Field(
        ImageAugmentConfig(), description="augmentation of training images"
    )

    @property
    def preprocessing(self) -> Preprocessing:
        """Return the preprocessing of evaluation."""
        return Preprocessing(self.image_size, self.mean, self.std)


class LabelledBatch(NamedTuple):
    """B images with a class each; one grey image that is not valid if all are bad."""

    # (B, 3, size, size) float32, normalised
    pixels: Tensor
    # (B,) int64
    labels: Tensor
    # (B,) bool
    valid: Tensor
    skipped: tuple[SkippedSample, ...] = ()

    def to(self, device: torch.device | str) -> LabelledBatch:
        """Move every tensor to `device`."""
        return to_device(self, device)


class LabelledSamples:
    """Reads and augments one training image."""

    def __init__(self, images: LabelledImages, config: LabelledDataConfig) -> None:
        self.images, self.config = images, config
        self._preprocessing = config.preprocessing
        self._policy = None
        if config.augment.policy is not None:
            from timm.data.auto_augment import auto_augment_transform, rand_augment_transform

            grey = tuple(round(255 * value) for value in config.mean)
            make = (
                rand_augment_transform
                if config.augment.policy.startswith("rand")
                else auto_augment_transform
            )
            try:
                self._policy = make(config.augment.policy, {"img_mean": grey})
            except (AssertionError, KeyError, ValueError) as error:
                raise ConfigError(f"augment.policy {config.augment.policy!r}: {error}") from error

    def __len__(self) -> int:
        return len(self.images)

    def __call__(self, number: int, rng_for: RngFactory) -> tuple[Tensor, int]:
        """Return the pixels (3, size, size) and class."""
        read = self.images.read(number)
        return self.pixels(read.image, rng_for), read.label

    def pixels(self, image: Image.Image, rng_for: RngFactory) -> Tensor:
        """Augment one image: (3, size, size) float32, normalised."""
        augment, size = self.config.augment, self.config.image_size
        rng = rng_for("augment")
        box = random_crop(image.width, image.height, augment.crop_scale, rng)
        if image.size != (size, size) or box != (0, 0, size, size):
            image = image.resize((size, size), Image.Resampling.BICUBIC, box=box)
        if augment.shift:
            right, down = rng.integers(-augment.shift, augment.shift + 1, 2).tolist()
            moved_box = (-right, -down, size - right, size - down)
            image = image.crop(moved_box)  # what lies outside is black
        if augment.hflip and rng.random() < 0.5:
            image = ImageOps.mirror(image)
        if self._policy is not None:
            with _seeded(rng_for("policy")):
                image = self._policy(image)
        pixels = self._preprocessing.normalise(image)
        if rng.random() < augment.erasing:
            _erase(pixels, rng_for("erasing"))
        return pixels


def labelled_data(
    images: LabelledImages, config: LabelledDataConfig, batch: int, seed: int
) -> OrderedData:
    """Return the training batches of `images` by the settings `config.train`."""
    images = subset(images, config.limit, config.train)
    samples = LabelledSamples(images, config)
    collate = partial(_collate, size=config.image_size)
    return indexed_data(len(samples), samples, collate, config, batch, seed)


def _collate(
    samples: list[tuple[Tensor, int]], skipped: tuple[SkippedSample, ...], size: int
) -> LabelledBatch:
    valid = torch.ones(len(samples), dtype=torch.bool)
    if not samples:  # models want a row; it counts nowhere
        samples, valid = [(torch.zeros(3, size, size), 0)], torch.zeros(1, dtype=torch.bool)
    pixels = torch.stack([image for image, _ in samples])
    labels = torch.tensor([label for _, label in samples], dtype=torch.int64)
    return LabelledBatch(pixels, labels, valid, skipped)


@contextmanager
def _seeded(rng: np.random.Generator) -> Iterator[None]:
    # timm's policies draw from the global generators.
    before = random.getstate(), np.random.get_state()
    seed = int(rng.integers(2**32))
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _erase(pixels: Tensor, rng: np.random.Generator) -> None:
    """Fill a random box, 2 to 33 % of the area, with noise (Zhong et al. 2017; DeiT: `pixel`)."""
    _, height, width = pixels.shape
    for _ in range(10):
        area = rng.uniform(0.02, 1 / 3) * height * width
        ratio = np.exp(rng.uniform(np.log(0.3), np.log(1 / 0.3)))
        rows, columns = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if rows < height and columns < width:
            top, left = int(rng.integers(height - rows)), int(rng.integers(width - columns))
            noise = torch.from_numpy(rng.standard_normal((3, rows, columns)).astype(np.float32))
            pixels[:, top : top + rows, left : left + columns] = noise
            return
