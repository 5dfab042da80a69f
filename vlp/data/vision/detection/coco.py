"""COCO's `instances` files: what is in them is checked once, images are read one by one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from vlp.config import ConfigError
from vlp.data.image.decode import decode_image
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.tar import Member, read_members
from vlp.data.vision.detection.objects import CocoSource, ObjectImage, checked_boxes
from vlp.io import parse_json

_SHAPE_ROUNDING = 2.0
"""Pixels by which a resized image may miss the shape that the annotation tells."""

_KEYS = {
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("id", "image_id", "category_id", "bbox"),
    "categories": ("id", "name"),
}

_KINDS: dict[str, tuple[type, ...]] = {
    "id": (int, str),
    "image_id": (int, str),
    "category_id": (int, str),
    "area": (int, float),
}


class CocoImages:
    """Images of an annotation file in the order of their ids, also those without objects.

    Images may be stored at another size than the annotation's. Classes are the categories in the
    order of their ids, which have gaps in COCO.

    Args:
        source: annotation file and images.
        classes: names in order, as training had them; None takes the file's own.

    Raises:
        ConfigError: a file is missing or has another schema, annotations of images or categories
            that the file lacks, or categories with objects that are none of `classes` or share a
            name.
    """

    def __init__(self, source: CocoSource, classes: Sequence[str] | None = None) -> None:
        file = Path(source.annotations)
        content = _read(file)
        self._file = file
        self._images = sorted(content["images"], key=_id_order)
        categories = _of_own_name(content)
        names = [str(category["name"]) for category in categories]
        _require_unique(file, "images with the same id", [image["id"] for image in self._images])
        _require_unique(file, "categories with the same id", [one["id"] for one in categories])
        _require_unique(file, "categories with the same name", names)
        self.classes = tuple(names) if classes is None else tuple(classes)
        if unknown := [name for name in names if name not in self.classes]:
            raise ConfigError(
                f"{file}: unknown categories {', '.join(unknown[:5])} ({len(unknown)} of "
                f"{len(names)}); the model knows {', '.join(self.classes[:5])}, ..."
            )
        label = {one["id"]: self.classes.index(str(one["name"])) for one in categories}
        self._objects = _by_image(file, content["annotations"], self._images, label)
        self._label = label
        self._files = _ImageFiles(Path(source.images))

    def __len__(self) -> int:
        return len(self._images)

    def read(self, number: int) -> ObjectImage:
        """Return image `number`, in the order of ids, and its objects."""
        entry = self._images[number]
        width, height = entry["width"], entry["height"]
        where = f"{self._file}, image {entry['id']} ({entry['file_name']})"
        image = self._files.read(str(entry["file_name"]), where)
        _require_shape(image, width, height, where)
        objects = self._objects.get(entry["id"], [])
        boxes = np.array([one["bbox"] for one in objects], dtype=np.float64).reshape(-1, 4)
        corners = checked_boxes(
            boxes, [f"annotation {one['id']}" for one in objects], width, height, where
        )
        sides = boxes[:, 2:]
        areas = [one.get("area", w * h) for one, (w, h) in zip(objects, sides)]
        return ObjectImage(
            image,
            width,
            height,
            corners,
            np.array([self._label[one["category_id"]] for one in objects], dtype=np.int64),
            np.array(areas, dtype=np.float64),
            np.array([bool(one.get("iscrowd", 0)) for one in objects], dtype=bool),
            where,
        )


class _ImageFiles:
    """A folder or a plain tar file of images, by file name."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._members: dict[str, Member] | None = None
        if place.is_file():
            members, problem = read_members(place, "archive_members")
            if problem is not None:
                raise ConfigError(f"{place}: {problem}; images come in a plain tar file")
            self._members = {PurePosixPath(member.name).name: member for member in members}
        elif not place.is_dir():
            raise ConfigError(f"{place}: there is neither a folder nor a tar file of images")

    def read(self, name: str, where: str) -> Image.Image:
        """Decode one.

        Raises:
            BadSample: it is not there, or no image.
        """
        try:
            if self._members is None:
                content = _inside(self._place, name).read_bytes()
            else:
                member = self._members[PurePosixPath(name).name]
                with self._place.open("rb") as file:
                    file.seek(member.offset)
                    content = file.read(member.size)
        except (KeyError, OSError, ValueError) as error:  # or the name cannot be one
            raise BadSample("missing image", f"{where}: not in {self._place}") from error
        return decode_image(content, where)


def _id_order(entry: dict[str, Any]) -> tuple[bool, Any]:
    return isinstance(entry["id"], str), entry["id"]


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder.

    Raises:
        FileNotFoundError: the name leads out of it.
    """
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise FileNotFoundError(name)
    return folder / name


def _read(file: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON ({error})") from error
    for part, keys in _KEYS.items():
        entries = content.get(part) if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise ConfigError(f"{file}: no list {part!r}; is it an instances file of COCO?")
        for number, entry in enumerate(entries):
            missing = [key for key in keys if not isinstance(entry, dict) or key not in entry]
            if missing:
                raise ConfigError(f"{file}: {part}[{number}] lacks {', '.join(missing)}")
            for key, kinds in _KINDS.items():
                if not isinstance(entry.get(key, 0), kinds):
                    raise ConfigError(f"{file}: {part}[{number}] has the {key} {entry[key]!r}")
    for image in content["images"]:
        sides = image["width"], image["height"]
        if not all(isinstance(side, int) and side > 0 for side in sides):
            raise ConfigError(f"{file}: image {image['id']} has {sides[0]} x {sides[1]} px")
    if not content["images"] or not content["categories"]:
        raise ConfigError(f"{file}: no images, or no categories")
    found: dict[str, list[dict[str, Any]]] = content
    return found


def _by_image(
    file: Path,
    annotations: Iterable[dict[str, Any]],
    images: Iterable[dict[str, Any]],
    label: dict[Any, int],
) -> dict[Any, list[dict[str, Any]]]:
    """Annotations by the id of their image.

    Raises:
        ConfigError: of an image or a category that the file lacks, or a box of other than four
            numbers.
    """
    known = {image["id"] for image in images}
    objects = defaultdict(list)
    wrong = defaultdict(list)
    for one in annotations:
        if one["image_id"] not in known:
            wrong["image"].append((one["id"], one["image_id"]))
        elif one["category_id"] not in label:
            wrong["category"].append((one["id"], one["category_id"]))
        elif not _is_box(one["bbox"]):
            raise ConfigError(f"{file}: annotation {one['id']} has the box {one['bbox']!r}")
        objects[one["image_id"]].append(one)
    for what, found in wrong.items():
        article = "an" if what == "image" else "a"
        first = ", ".join(f"annotation {number} of {what} {id_}" for number, id_ in found[:5])
        raise ConfigError(
            f"{file}: {len(found)} annotations are of {article} {what} that the file lacks: {first}"
        )
    return dict(objects)


def _is_box(box: Any) -> bool:
    return (
        isinstance(box, list)
        and len(box) == 4
        and all(isinstance(value, int | float) and math.isfinite(value) for value in box)
    )


def _of_own_name(content: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Categories by id; one without objects does not share a name (as Roboflow's root may)."""
    used = {one["category_id"] for one in content["annotations"]}
    categories = sorted(content["categories"], key=_id_order)
    taken = {str(one["name"]) for one in categories if one["id"] in used}
    return [one for one in categories if one["id"] in used or str(one["name"]) not in taken]


def _require_unique(file: Path, what: str, values: Sequence[Any]) -> None:
    if len(set(values)) < len(values):
        twice = sorted({value for value in values if values.count(value) > 1}, key=str)
        raise ConfigError(f"{file}: {what}: {', '.join(map(str, twice[:5]))}")


def _require_shape(image: Image.Image, width: int, height: int, where: str) -> None:
    """The stored image is the annotated one, perhaps resized.

    Raises:
        BadSample: its shape is another.
    """
    scale = max(image.width / width, image.height / height)
    misses = max(abs(image.width - scale * width), abs(image.height - scale * height))
    if misses > _SHAPE_ROUNDING:
        raise BadSample(
            "image of another shape",
            f"{where}: {image.width} x {image.height} px, annotated {width} x {height}",
        )
