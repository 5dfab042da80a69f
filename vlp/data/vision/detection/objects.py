"""Images with objects in boxes: COCO's annotation files, and generated scenes."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from vlp.config import Config, ConfigError
from vlp.data.scenes.graph import SHAPES
from vlp.data.scenes.render import render
from vlp.data.scenes.sample import sample_scene
from vlp.data.scenes.splits import Split
from vlp.data.shards.sample_files import BadSample

ROUNDING = 1.0
"""Pixels by which a box may stand over the image's edge: annotators' rounding, which is cut."""


class CocoSource(Config):
    """Images and an annotation file in COCO's `instances` schema."""

    format: Literal["coco"] = Field(description="selects this class")
    annotations: str = Field(
        description="a file such as instances_train2017.json", json_schema_extra={"resume": "path"}
    )
    images: str = Field(
        description="a folder or a plain tar file of its images",
        json_schema_extra={"resume": "path"},
    )


class SceneSource(Config):
    """Generated images of coloured shapes; the classes are the shapes."""

    format: Literal["scenes"] = Field(description="selects this class")
    count: int = Field(ge=1, description="number of images")
    split: Split = Field("train", description="no other split has the same contents")
    seed: int = Field(0, ge=0, description="of the scenes; all runs of a comparison share it")


ObjectSource = Annotated[CocoSource | SceneSource, Field(discriminator="format")]


class ObjectImage(NamedTuple):
    """An image (RGB) and its objects, in pixels of `width` x `height`.

    The image itself may have other pixels than the annotation. boxes (objects, 4) float64: left,
    top, right, bottom, inside the image; labels (objects,) int64; areas (objects,) float64, what
    COCO's small, medium and large go by; crowds (objects,) bool: regions of many objects.
    """

    image: Image.Image
    width: int
    height: int
    boxes: NDArray[np.float64]
    labels: NDArray[np.int64]
    areas: NDArray[np.float64]
    crowds: NDArray[np.bool_]
    where: str


class ObjectImages(Protocol):
    """An image and its objects by number, 0 to len - 1."""

    classes: tuple[str, ...]

    def __len__(self) -> int:
        """Images."""

    def read(self, number: int) -> ObjectImage:
        """One of them.

        Raises:
            BadSample: it cannot be decoded, or its boxes lie outside of it.
        """


class SceneImages:
    """Generated scenes as images with objects; every size shows the same scenes.

    Args:
        source: which scenes.
        image_size: side in pixels.

    Raises:
        ConfigError: the side is below 16 px.
    """

    classes: tuple[str, ...] = SHAPES

    def __init__(self, source: SceneSource, image_size: int) -> None:
        if image_size < 16:
            raise ConfigError(f"scenes have 16 px a side at least, not {image_size}")
        self._source, self._size = source, image_size

    def __len__(self) -> int:
        return self._source.count

    def read(self, number: int) -> ObjectImage:
        """Scene `number` of the split."""
        source, side = self._source, self._size
        scene = sample_scene(source.seed, number, source.split, side)
        boxes = np.array([obj.box for obj in scene.objects], dtype=np.float64)
        areas = boxes[:, 2] * boxes[:, 3]
        boxes[:, 2:] += boxes[:, :2]
        labels = np.array([SHAPES.index(obj.shape) for obj in scene.objects], dtype=np.int64)
        crowds = np.zeros(len(boxes), dtype=bool)
        return ObjectImage(render(scene), side, side, boxes, labels, areas, crowds, scene.key)


def checked_boxes(
    boxes: NDArray[np.float64], names: list[str], width: int, height: int, where: str
) -> NDArray[np.float64]:
    """Boxes x, y, width, height as left, top, right, bottom inside the image.

    Args:
        boxes: (objects, 4), pixels.
        names: what errors call each object.
        width: of the image.
        height: of the image.
        where: what errors call the image.

    Raises:
        BadSample: a box has no area, is not made of numbers, or stands over the edge by more than
            `ROUNDING`.
    """
    corners = boxes.copy()
    corners[:, 2:] += corners[:, :2]
    limit = np.array([width, height, width, height], dtype=np.float64)
    cut = np.clip(corners, 0, limit)
    outside = ~(np.abs(corners - cut) <= ROUNDING).all(-1)  # NaN is outside, too
    empty = ~((cut[:, 2:] - cut[:, :2]) > 0).all(-1)
    for kind, wrong in (("box outside the image", outside), ("box without area", empty)):
        if wrong.any():
            first = int(wrong.argmax())
            values = ", ".join(f"{value:g}" for value in boxes[first])
            raise BadSample(
                kind, f"{where}: {names[first]} [{values}] in an image of {width} x {height} px"
            )
    return cut
