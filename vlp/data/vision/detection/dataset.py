"""Detection: images of several sizes with boxes and classes, for training and for judging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from vlp.config import ConfigError
from vlp.data.config import ChannelDeviations, ChannelMeans, CropScale
from vlp.data.image.transforms import Preprocessing
from vlp.data.shards.bad_samples import SkippedSample
from vlp.data.shards.sample_files import BadSample
from vlp.data.stream.batch import moved
from vlp.data.stream.loader import OrderedData
from vlp.data.stream.map_dataset import MapDatasetConfig, RngFactory, indexed_data
from vlp.data.vision.detection.coco import CocoImages
from vlp.data.vision.detection.objects import (
    CocoSource,
    ObjectImage,
    ObjectImages,
    ObjectSource,
    SceneImages,
    SceneSource,
)

DETR_SIZES = tuple(range(480, 801, 32))


class DetectionDataConfig(MapDatasetConfig):
    """Images with boxes, and the sizes at which they are seen; DETR's are the defaults.

    An image keeps its shape but for rounding to whole multiples. Where `train` is of scenes they
    are drawn at the largest size and resized to the smaller ones.
    """

    train: ObjectSource = Field(description="images to train on, of one `format`")
    test: ObjectSource = Field(description="images to evaluate on, of one `format`")
    sizes: tuple[PositiveInt, ...] = Field(
        DETR_SIZES, min_length=1, description="shorter side in pixels, one is drawn for each visit"
    )
    test_sizes: tuple[PositiveInt, ...] = Field(
        (), description="shorter sides that are judged; empty is the largest of `sizes`"
    )
    longest: int = Field(1333, ge=1, description="longer side in pixels at most")
    multiple: int = Field(
        32, ge=1, description="sides are multiples of so many pixels: the backbone's stride"
    )
    hflip: bool = Field(True, description="left and right, every other time")
    crop: float = Field(0.0, ge=0, le=1, description="probability of a random crop; DETR: 0.5")
    crop_sides: CropScale = Field(
        (0.64, 1.0), description="share of either side that a crop keeps; DETR's is 384 to 600 px"
    )
    mean: ChannelMeans = Field(
        (0.485, 0.456, 0.406),
        description="per channel (R, G, B), of levels in [0, 1]; it is subtracted",
    )
    std: ChannelDeviations = Field(
        (0.229, 0.224, 0.225),
        description="per channel (R, G, B), of levels in [0, 1]; the rest is divided by it",
    )

    @property
    def evaluation_sizes(self) -> tuple[int, ...]:
        """Sizes of the evaluation."""
        return self.test_sizes or (max(self.sizes),)

    @property
    def shapes_differ(self) -> bool:
        """Return whether images may be other than squares; scenes are squares."""
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
        return self


class DetectionBatch(NamedTuple):
    """B images, each of its own size, with their objects.

    pixels: B times (3, height, width) float32, normalised; boxes: B times (objects, 4) float32,
    centre x, y, width, height as shares of the image; labels: B times (objects,) int64; valid
    (B,) bool.
    """

    pixels: tuple[Tensor, ...]
    boxes: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    valid: Tensor
    skipped: tuple[SkippedSample, ...] = ()

    def to(self, device: torch.device | str) -> DetectionBatch:
        """Move every tensor to `device`."""
        return moved(self, device)


class DetectionSample(NamedTuple):
    """One image of a `DetectionBatch`."""

    pixels: Tensor
    boxes: Tensor
    labels: Tensor


def open_objects(
    source: CocoSource | SceneSource, image_size: int, classes: Sequence[str] | None = None
) -> ObjectImages:
    """Open what a configuration names.

    Args:
        source: annotation file, or scenes.
        image_size: side in pixels at which scenes are drawn.
        classes: names in order, as training had them; None takes the source's own.

    Raises:
        ConfigError: it cannot be used, or has other classes.
    """
    if isinstance(source, CocoSource):
        return CocoImages(source, classes)
    scenes = SceneImages(source, image_size)
    if classes is not None and tuple(classes) != scenes.classes:
        raise ConfigError(
            f"scenes have the classes {', '.join(scenes.classes)}; the model knows "
            f"{', '.join(classes[:5])}"
        )
    return scenes


def fit_size(
    width: int, height: int, shortest: int, longest: int, multiple: int
) -> tuple[int, int]:
    """Width and height in pixels at which an image is seen.

    The shorter side is `shortest`, unless the longer one would be more than `longest`; both are
    rounded to multiples, so that an image fills the cells of a feature map exactly, and few
    shapes differ.
    """
    scale = min(shortest / min(width, height), longest / max(width, height))
    most = max(longest // multiple, 1)
    sides = (min(max(round(scale * side / multiple), 1), most) for side in (width, height))
    wide, high = (side * multiple for side in sides)
    return wide, high


class DetectionSamples:
    """Reads and augments one training image: crop, size, mirror.

    Args:
        images: where they come from.
        config: sizes and augmentation.
        most: objects that an image may have, the model's queries.
    """

    def __init__(self, images: ObjectImages, config: DetectionDataConfig, most: int) -> None:
        self.images, self.config, self.most = images, config, most
        self._preprocessing = Preprocessing(max(config.sizes), config.mean, config.std)

    def __len__(self) -> int:
        return len(self.images)

    def __call__(self, number: int, rng_for: RngFactory) -> DetectionSample:
        """Pixels, boxes and labels; crowds are left out, as in DETR.

        Raises:
            BadSample: the image cannot be used, or has more objects than queries.
        """
        config, read = self.config, self.images.read(number)
        image, boxes, labels = _without_crowds(read)
        rng = rng_for("crop")
        if rng.random() < config.crop:
            image, boxes, labels = _crop(image, boxes, labels, config.crop_sides, rng)
        if len(labels) > self.most:
            raise BadSample(
                "more objects than queries", f"{read.where}: {len(labels)}, not {self.most}"
            )
        shortest = config.sizes[int(rng_for("size").integers(len(config.sizes)))]
        size = fit_size(image.width, image.height, shortest, config.longest, config.multiple)
        image = _resized(image, size)
        if config.hflip and rng_for("mirror").random() < 0.5:
            image = ImageOps.mirror(image)
            boxes = np.stack([1 - boxes[:, 2], boxes[:, 1], 1 - boxes[:, 0], boxes[:, 3]], -1)
        centres = np.concatenate(
            [boxes[:, :2] + boxes[:, 2:], 2 * (boxes[:, 2:] - boxes[:, :2])], -1
        )
        return DetectionSample(
            self._preprocessing.normalise(image),
            torch.from_numpy(centres / 2).float(),
            torch.from_numpy(labels),
        )


def detection_data(
    images: ObjectImages, config: DetectionDataConfig, most: int, batch: int, seed: int
) -> OrderedData:
    """Training batches of `images`, those of `config.train`.

    Raises:
        ConfigError: the batch does not fit.
    """
    samples = DetectionSamples(images, config, most)
    return indexed_data(len(samples), samples, _collate, config, batch, seed)


def evaluation_pixels(read: ObjectImage, size: int, config: DetectionDataConfig) -> Tensor:
    """An image as evaluation sees it, its shorter side `size`: (3, height, width) float32."""
    image = read.image
    fitted = fit_size(image.width, image.height, size, config.longest, config.multiple)
    return Preprocessing(size, config.mean, config.std).normalise(_resized(image, fitted))


def _collate(samples: list[DetectionSample], skipped: tuple[SkippedSample, ...]) -> DetectionBatch:
    return DetectionBatch(
        tuple(one.pixels for one in samples),
        tuple(one.boxes for one in samples),
        tuple(one.labels for one in samples),
        torch.ones(len(samples), dtype=torch.bool),
        skipped,
    )


def _resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    return image if image.size == size else image.resize(size, Image.Resampling.BILINEAR)


def _without_crowds(read: ObjectImage) -> tuple[Image.Image, np.ndarray, np.ndarray]:
    """Image, boxes (left, top, right, bottom) as shares of it, and labels."""
    sides = np.array([read.width, read.height] * 2, dtype=np.float64)
    return read.image, read.boxes[~read.crowds] / sides, read.labels[~read.crowds]


def _crop(
    image: Image.Image,
    boxes: np.ndarray,
    labels: np.ndarray,
    sides: tuple[float, float],
    rng: np.random.Generator,
) -> tuple[Image.Image, np.ndarray, np.ndarray]:
    """Crop an image at random; boxes (shares) are cut to what lies in it."""
    whole = np.array(image.size)
    kept = np.maximum(np.rint(whole * rng.uniform(*sides, 2)), 1).astype(int)
    start = rng.integers(whole - kept + 1)
    image = image.crop((*start.tolist(), *(start + kept).tolist()))
    boxes = np.clip((boxes * np.tile(whole, 2) - np.tile(start, 2)) / np.tile(kept, 2), 0, 1)
    inside = (boxes[:, 2:] > boxes[:, :2]).all(-1)
    return image, boxes[inside], labels[inside]
