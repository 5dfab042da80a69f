"""Labelled images as batches, with the augmentation of DeiT's recipe."""

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
from vlp.data.config import CropScale, NormalisationConfig
from vlp.data.image.transforms import Preprocessing, random_crop
from vlp.data.labelled_images import LabelledImages, draw_subset
from vlp.data.shards.sample_files import SkippedSample
from vlp.data.stream.batch import to_device
from vlp.data.stream.loader import LabelledImagesConfig, OrderedData, RngFactory, indexed_data


class ImageAugmentConfig(Config):
    """Augmentation of a training image, in this order."""

    crop_scale: CropScale = Field(
        (1.0, 1.0), description="least and largest share of the area in a random crop; [1, 1]: none"
    )
    shift: int = Field(0, ge=0, description="largest random shift in pixels; the edge turns black")
    hflip: bool = Field(True, description="horizontal flip with probability 0.5")
    policy: str | None = Field(
        None, description="timm's AutoAugment policy, such as rand-m9-mstd0.5-inc1"
    )
    erasing: float = Field(0.0, ge=0, le=1, description="probability of random erasing")


class LabelledDataConfig(NormalisationConfig, LabelledImagesConfig):
    """Labelled images, their preprocessing and augmentation."""

    image_size: int = Field(224, ge=1, description="side of the images in pixels")
    augment: ImageAugmentConfig = Field(
        ImageAugmentConfig(), description="augmentation of training images"
    )

    @property
    def preprocessing(self) -> Preprocessing:
        """Return the preprocessing of evaluation."""
        return Preprocessing(self.image_size, self.mean, self.std)


class LabelledBatch(NamedTuple):
    """B images with a class each; if all samples are bad, one grey row that is not valid."""

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
    """Training samples: augmented images with their classes."""

    def __init__(self, images: LabelledImages, config: LabelledDataConfig) -> None:
        self.images, self.config = images, config
        self._preprocessing = config.preprocessing
        self._policy = None
        if (policy := config.augment.policy) is not None:
            from timm.data.auto_augment import auto_augment_transform, rand_augment_transform

            fill = {"img_mean": tuple(round(255 * value) for value in config.mean)}
            is_rand = policy.startswith("rand")
            create_policy = rand_augment_transform if is_rand else auto_augment_transform
            try:
                self._policy = create_policy(policy, fill)
            except (AssertionError, KeyError, ValueError) as error:
                raise ConfigError(f"data.augment.policy {policy!r}: {error}") from error

    def __call__(self, number: int, rng_for: RngFactory) -> tuple[Tensor, int]:
        """Return the pixels (3, size, size) and class of image `number`; raises BadSample."""
        sample = self.images.read(number)
        return self.pixels(sample.image, rng_for), sample.label

    def pixels(self, image: Image.Image, rng_for: RngFactory) -> Tensor:
        """Augment an image and normalise it: (3, size, size) float32."""
        augment, size = self.config.augment, self.config.image_size
        rng = rng_for("augment")
        box = random_crop(image.width, image.height, augment.crop_scale, rng)
        if image.size != (size, size) or box != (0, 0, size, size):
            image = image.resize((size, size), Image.Resampling.BICUBIC, box=box)
        if augment.shift:
            right, down = rng.integers(-augment.shift, augment.shift + 1, 2).tolist()
            shifted_box = (-right, -down, size - right, size - down)
            image = image.crop(shifted_box)  # Pillow fills with black outside of the image
        if augment.hflip and rng.random() < 0.5:
            image = ImageOps.mirror(image)
        if self._policy is not None:
            with _seed_global_generators(rng_for("policy")):
                image = self._policy(image)
        pixels = self._preprocessing.normalise(image)
        if rng.random() < augment.erasing:
            _erase(pixels, rng_for("erasing"))
        return pixels


def labelled_data(
    images: LabelledImages, config: LabelledDataConfig, batch: int, seed: int
) -> OrderedData:
    """Return the training batches of `images`, which were opened from `config.train`."""
    images = draw_subset(images, config.limit, config.train)
    samples = LabelledSamples(images, config)
    collate = partial(_collate, size=config.image_size)
    return indexed_data(len(images), samples, collate, config, batch, seed)


def _collate(
    samples: list[tuple[Tensor, int]], skipped: tuple[SkippedSample, ...], size: int
) -> LabelledBatch:
    valid = torch.ones(len(samples), dtype=torch.bool)
    if not samples:  # a model may not run on 0 rows
        samples, valid = [(torch.zeros(3, size, size), 0)], torch.zeros(1, dtype=torch.bool)
    pixels = torch.stack([image for image, _ in samples])
    labels = torch.tensor([label for _, label in samples], dtype=torch.int64)
    return LabelledBatch(pixels, labels, valid, skipped)


@contextmanager
def _seed_global_generators(rng: np.random.Generator) -> Iterator[None]:
    # timm's policies draw from the global generators.
    python_state, numpy_state = random.getstate(), np.random.get_state()
    seed = int(rng.integers(2**32))
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _erase(pixels: Tensor, rng: np.random.Generator) -> None:
    """Fill a random box, 2 to 33 % of the area, with noise (Zhong et al. 2017; DeiT: `pixel`)."""
    _, height, width = pixels.shape
    for _ in range(10):  # as timm's RandomErasing: a drawn box may not fit
        area = rng.uniform(0.02, 1 / 3) * height * width
        ratio = np.exp(rng.uniform(np.log(0.3), np.log(1 / 0.3)))
        rows, columns = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if rows < height and columns < width:
            top, left = int(rng.integers(height - rows)), int(rng.integers(width - columns))
            noise = torch.from_numpy(rng.standard_normal((3, rows, columns)).astype(np.float32))
            pixels[:, top : top + rows, left : left + columns] = noise
            return
