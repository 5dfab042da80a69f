"""Detection: pictures of several sizes with boxes and classes, for training and for judging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from pydantic import Field, model_validator
from torch import Tensor

from vlp.config import ConfigError
from vlp.data.image.transforms import Preprocessing
from vlp.data.pretrain.loader import OrderedData
from vlp.data.shards.bad_samples import Skip
from vlp.data.shards.sample_files import BadSample
from vlp.data.stream.batch import moved
from vlp.data.stream.map_dataset import Draws, OrderConfig, indexed_data
from vlp.data.vision.detection.coco import CocoPictures
from vlp.data.vision.detection.objects import (
    CocoSource,
    ObjectPicture,
    ObjectPictures,
    ObjectSource,
    ScenePictures,
    SceneSource,
)

DETR_SIZES = tuple(range(480, 801, 32))


class DetectionDataConfig(OrderConfig):
    """Pictures with boxes, and the sizes at which they are seen; DETR's are the defaults.

    A picture keeps its shape but for rounding to whole multiples. Where `train` is of scenes they
    are drawn at the largest size and resized to the smaller ones.
    """

    train: ObjectSource
    test: ObjectSource
    sizes: tuple[int, ...] = Field(
        DETR_SIZES, min_length=1, description="shorter side in pixels, one is drawn for each visit"
    )
    test_sizes: tuple[int, ...] = Field(
        (), description="shorter sides that are judged; empty is the largest of `sizes`"
    )
    longest: int = Field(1333, ge=1, description="longer side in pixels at most")
    multiple: int = Field(
        32, ge=1, description="sides are multiples of so many pixels: the backbone's stride"
    )
    mirror: bool = Field(True, description="left and right, every other time")
    crop: float = Field(0.0, ge=0, le=1, description="probability of a random crop; DETR: 0.5")
    crop_sides: tuple[float, float] = Field(
        (0.64, 1.0), description="share of either side that a crop keeps; DETR's is 384 to 600 px"
    )
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    @property
    def judged_sizes(self) -> tuple[int, ...]:
        """Sizes of the evaluation."""
        return self.test_sizes or (max(self.sizes),)

    @property
    def shapes_differ(self) -> bool:
        """Whether there may be other pictures than squares; scenes are squares."""
        scenes = isinstance(self.train, SceneSource) and isinstance(self.test, SceneSource)
        return not scenes or self.crop > 0

    @property
    def largest_side(self) -> int:
        """Pixels of the longest side that training can see."""
        side = self.longest if self.shapes_differ else max(self.sizes)
        return fit_size(side, side, side, self.longest, self.multiple)[0]

    @model_validator(mode="after")
    def _sizes_fit(self) -> DetectionDataConfig:
        for size in (*self.sizes, *self.test_sizes):
            if not self.multiple <= size <= self.longest:
                raise ValueError(
                    f"size {size} is not between multiple {self.multiple} and longest "
                    f"{self.longest}"
                )
        low, high = self.crop_sides
        if not 0 < low <= high <= 1:
            raise ValueError(f"crop_sides {low} to {high} are no shares in order")
        return self


class DetectionBatch(NamedTuple):
    """B pictures, each of its own size, with their objects.

    pixels: B times (3, height, width) float32, normalised; boxes: B times (objects, 4) float32,
    centre x, y, width, height as shares of the picture; labels: B times (objects,) int64; valid
    (B,) bool.
    """

    pixels: tuple[Tensor, ...]
    boxes: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    valid: Tensor
    skipped: tuple[Skip, ...] = ()

    def to(self, device: torch.device | str) -> DetectionBatch:
        """Move every tensor to `device`."""
        return moved(self, device)


class Sample(NamedTuple):
    """One picture of a `DetectionBatch`."""

    pixels: Tensor
    boxes: Tensor
    labels: Tensor


def open_objects(
    source: CocoSource | SceneSource, image_size: int, classes: Sequence[str] | None = None
) -> ObjectPictures:
    """Open what a configuration names.

    Args:
        source: annotation file, or scenes.
        image_size: side in pixels at which scenes are drawn.
        classes: names in order, as training had them; None takes the source's own.

    Raises:
        ConfigError: it cannot be used, or has other classes.
    """
    if isinstance(source, CocoSource):
        return CocoPictures(source, classes)
    scenes = ScenePictures(source, image_size)
    if classes is not None and tuple(classes) != scenes.classes:
        raise ConfigError(
            f"scenes have the classes {', '.join(scenes.classes)}; the model knows "
            f"{', '.join(classes[:5])}"
        )
    return scenes


def fit_size(
    width: int, height: int, shortest: int, longest: int, multiple: int
) -> tuple[int, int]:
    """Width and height in pixels at which a picture is seen.

    The shorter side is `shortest`, unless the longer one would be more than `longest`; both are
    rounded to multiples, so that a picture fills the cells of a feature map exactly, and few
    shapes differ.
    """
    scale = min(shortest / min(width, height), longest / max(width, height))
    most = max(longest // multiple, 1)
    sides = (min(max(round(scale * side / multiple), 1), most) for side in (width, height))
    wide, high = (side * multiple for side in sides)
    return wide, high


class DetectionSamples:
    """Reads and augments one training picture: crop, size, mirror.

    Args:
        pictures: where they come from.
        config: sizes and augmentation.
        most: objects that a picture may have, the model's queries.
    """

    def __init__(self, pictures: ObjectPictures, config: DetectionDataConfig, most: int) -> None:
        self.pictures, self.config, self.most = pictures, config, most
        self._preprocessing = Preprocessing(max(config.sizes), config.mean, config.std)

    def __len__(self) -> int:
        return len(self.pictures)

    def __call__(self, number: int, draws: Draws) -> Sample:
        """Pixels, boxes and labels; crowds are left out, as in DETR.

        Raises:
            BadSample: the picture cannot be used, or has more objects than queries.
        """
        config, read = self.config, self.pictures.read(number)
        picture, boxes, labels = _without_crowds(read)
        rng = draws("crop")
        if rng.random() < config.crop:
            picture, boxes, labels = _crop(picture, boxes, labels, config.crop_sides, rng)
        if len(labels) > self.most:
            raise BadSample(
                "more objects than queries", f"{read.where}: {len(labels)}, not {self.most}"
            )
        shortest = config.sizes[int(draws("size").integers(len(config.sizes)))]
        size = fit_size(picture.width, picture.height, shortest, config.longest, config.multiple)
        picture = _resized(picture, size)
        if config.mirror and draws("mirror").random() < 0.5:
            picture = ImageOps.mirror(picture)
            boxes = np.stack([1 - boxes[:, 2], boxes[:, 1], 1 - boxes[:, 0], boxes[:, 3]], -1)
        centres = np.concatenate(
            [boxes[:, :2] + boxes[:, 2:], 2 * (boxes[:, 2:] - boxes[:, :2])], -1
        )
        return Sample(
            self._preprocessing.normalise(picture),
            torch.from_numpy(centres / 2).float(),
            torch.from_numpy(labels),
        )


def detection_data(
    pictures: ObjectPictures, config: DetectionDataConfig, most: int, batch: int, seed: int
) -> OrderedData:
    """Training batches of `pictures`, those of `config.train`.

    Raises:
        ConfigError: the batch does not fit.
    """
    samples = DetectionSamples(pictures, config, most)
    return indexed_data(len(samples), samples, _collate, config, batch, seed)


def judged_pixels(read: ObjectPicture, size: int, config: DetectionDataConfig) -> Tensor:
    """A picture as evaluation sees it, its shorter side `size`: (3, height, width) float32."""
    picture = read.picture
    fitted = fit_size(picture.width, picture.height, size, config.longest, config.multiple)
    return Preprocessing(size, config.mean, config.std).normalise(_resized(picture, fitted))


def _collate(samples: list[Sample], skipped: tuple[Skip, ...]) -> DetectionBatch:
    return DetectionBatch(
        tuple(one.pixels for one in samples),
        tuple(one.boxes for one in samples),
        tuple(one.labels for one in samples),
        torch.ones(len(samples), dtype=torch.bool),
        skipped,
    )


def _resized(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    return picture if picture.size == size else picture.resize(size, Image.Resampling.BILINEAR)


def _without_crowds(read: ObjectPicture) -> tuple[Image.Image, np.ndarray, np.ndarray]:
    """Picture, boxes (left, top, right, bottom) as shares of it, and labels."""
    sides = np.array([read.width, read.height] * 2, dtype=np.float64)
    return read.picture, read.boxes[~read.crowds] / sides, read.labels[~read.crowds]


def _crop(
    picture: Image.Image,
    boxes: np.ndarray,
    labels: np.ndarray,
    sides: tuple[float, float],
    rng: np.random.Generator,
) -> tuple[Image.Image, np.ndarray, np.ndarray]:
    """A random part of a picture, and what of the boxes (shares) lies in it."""
    whole = np.array(picture.size)
    kept = np.maximum(np.rint(whole * rng.uniform(*sides, 2)), 1).astype(int)
    start = rng.integers(whole - kept + 1)
    picture = picture.crop((*start.tolist(), *(start + kept).tolist()))
    boxes = np.clip((boxes * np.tile(whole, 2) - np.tile(start, 2)) / np.tile(kept, 2), 0, 1)
    inside = (boxes[:, 2:] > boxes[:, :2]).all(-1)
    return picture, boxes[inside], labels[inside]
