"""Detection data: COCO or generated scenes, as images of various sizes with boxes and classes."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    model_validator,
)
from torch import Tensor

from vlp.config import Config, ConfigError
from vlp.data.boxes import Corners, clip_box, relative_corners, turn_of
from vlp.data.config import CropScale, NormalisationConfig
from vlp.data.file_names import FileNames, is_hidden
from vlp.data.image.decode import decode_image, decoder_errors, open_image, orientation
from vlp.data.image.transforms import Preprocessing
from vlp.data.limits import MAX_ARCHIVE_MEMBERS
from vlp.data.shards.sample_files import BadSample, SkippedSample
from vlp.data.shards.tar import Member, read_members
from vlp.data.stream.batch import to_device
from vlp.data.stream.loader import MapDatasetConfig, RngFactory, warn_of_training_data
from vlp.io import parse_json
from vlp.scenes.graph import SHAPES
from vlp.scenes.render import render
from vlp.scenes.sample import Split, sample_scene

logger = logging.getLogger(__name__)


class CocoSource(Config):
    """Images and an annotation file in COCO's `instances` schema."""

    format: Literal["coco"] = Field(description="selects this class")
    annotations: str = Field(
        description="annotation file such as instances_train2017.json",
        json_schema_extra={"resume": "path"},
    )
    images: str = Field(
        description="folder or uncompressed tar file of the images",
        json_schema_extra={"resume": "path"},
    )


class SceneSource(Config):
    """Generated images of coloured shapes; the classes are the shapes."""

    format: Literal["scenes"] = Field(description="selects this class")
    count: int = Field(ge=1, description="number of images")
    split: Split = Field("train", description="split of the corpus; splits share no contents")
    seed: int = Field(
        0, ge=0, description="seed of the scenes; all runs of a comparison must share it"
    )


ObjectSource = Annotated[CocoSource | SceneSource, Field(discriminator="format")]


class ObjectImage(NamedTuple):
    """An RGB image and its objects."""

    # It may be stored in another size than `width` x `height`.
    image: Image.Image
    # Pixels of the annotated image, in which boxes and areas are measured.
    width: int
    height: int
    # (objects, 4): left, top, right, bottom, inside the image
    boxes: NDArray[np.float64]
    # (objects,) index in `ObjectImages.classes`
    labels: NDArray[np.int64]
    # (objects,) square pixels, for COCO's small, medium and large
    areas: NDArray[np.float64]
    # (objects,) True = a region of several objects, which is no target
    crowds: NDArray[np.bool_]
    # Location for messages.
    where: str


class SceneImages:
    """Generated scenes as images with objects; scene n has the same contents at every size."""

    classes: tuple[str, ...] = SHAPES

    def __init__(self, source: SceneSource, image_size: int) -> None:
        if image_size < 16:
            raise ConfigError(f"scenes need sides of 16 px or more, not {image_size}")
        self._source, self._size = source, image_size

    def __len__(self) -> int:
        return self._source.count

    def read(self, number: int) -> ObjectImage:
        """Render scene `number` of the split."""
        source, side = self._source, self._size
        scene = sample_scene(source.seed, number, source.split, side)
        boxes = np.array([obj.box for obj in scene.objects], dtype=np.float64)
        areas = boxes[:, 2] * boxes[:, 3]
        boxes[:, 2:] += boxes[:, :2]
        labels = np.array([SHAPES.index(obj.shape) for obj in scene.objects], dtype=np.int64)
        crowds = np.zeros(len(boxes), dtype=bool)
        return ObjectImage(render(scene), side, side, boxes, labels, areas, crowds, scene.key)


def _plain_id(value: Any) -> Any:
    # Exporters write `"1"` and `1.0` for 1.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and re.fullmatch("0|[1-9][0-9]{0,17}", value):
        return int(value)
    return value


class _Row(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


_Id = Annotated[int | str, BeforeValidator(_plain_id)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Image(_Row):
    id: _Id
    file_name: str
    width: PositiveInt | None = None
    height: PositiveInt | None = None


class _Object(_Row):
    id: Any = None  # only messages name it, and some exporters write none
    image_id: _Id
    category_id: _Id
    bbox: tuple[_Finite, _Finite, _Finite, _Finite]
    area: _Finite | None = None
    iscrowd: bool | None = None


class _Category(_Row):
    id: _Id
    name: Annotated[str, BeforeValidator(str)]


AnyRow = TypeVar("AnyRow", bound=_Row)


class CocoImages:
    """Images of an annotation file in the order of their ids, with or without objects.

    Boxes are clipped to their image (`vlp.data.boxes.clip_box`).

    Args:
        classes: names in the order of training; None: the file's categories in the order of ids.
    """

    def __init__(self, source: CocoSource, classes: Sequence[str] | None = None) -> None:
        file = Path(source.annotations)
        content = _read_annotations(file)
        faults: dict[str, list[str]] = defaultdict(list)
        self._file = file
        self._images = sorted(_rows(file, content, "images", _Image, faults), key=_id_order)
        annotations = _rows(file, content, "annotations", _Object, faults)
        categories = _rows(file, content, "categories", _Category, faults)
        if not self._images or not categories:
            raise ConfigError(f"{file}: no images, or no categories")
        categories = _drop_unused(categories, annotations)
        names = [category.name for category in categories]
        _require_unique(file, "images with the same id", [image.id for image in self._images])
        _require_unique(file, "categories with the same id", [row.id for row in categories])
        _require_unique(file, "categories with the same name", names)
        self.classes = tuple(names) if classes is None else tuple(classes)
        if unknown := [name for name in names if name not in self.classes]:
            raise ConfigError(
                f"{file}: unknown categories {', '.join(unknown[:5])} ({len(unknown)} of "
                f"{len(names)}); the model knows {', '.join(self.classes[:5])}, ..."
            )
        self._label = {row.id: self.classes.index(row.name) for row in categories}
        self._objects = self._by_image(annotations, faults)
        if annotations and not self._objects:
            raise ConfigError(f"{file}: no annotation can be used; {_summary(faults)}")
        # Bad rows are left out: a few of thousands should not end the run.
        if faults:
            logger.warning("%s: %s", file, _summary(faults))
        self._files = _ImageFiles(Path(source.images), [image.file_name for image in self._images])

    def __len__(self) -> int:
        return len(self._images)

    def read(self, number: int) -> ObjectImage:
        """Read image `number`, in the order of ids, and its objects; raises BadSample."""
        entry = self._images[number]
        where = f"{self._file}, image {entry.id} ({entry.file_name})"
        content = self._files.read(entry.file_name, where)
        image = decode_image(content, where)
        # The image may be stored smaller than annotated, and annotated before EXIF turned it.
        annotated_size = (entry.width, entry.height) if entry.width and entry.height else None
        size = annotated_size or image.size
        if (turn := turn_of(size, image.size, 1)) is None:
            with decoder_errors(where), open_image(content, where) as header:
                turn = turn_of(size, image.size, orientation(header))
        if turn is None:
            raise BadSample(
                "image of another shape",
                f"{where}: {image.width} x {image.height} px, annotated {size[0]} x {size[1]}",
            )
        objects = self._objects.get(entry.id, [])
        if annotated_size is None:
            clipped = ((row, clip_box(row.bbox, size)[1]) for row, _ in objects)
            objects = [(row, corners) for row, corners in clipped if corners is not None]
        boxes = np.array([corners for _, corners in objects], dtype=np.float64).reshape(-1, 4)
        if turn != 1:
            relative = [relative_corners(corners, size, turn) for _, corners in objects]
            size = size[1], size[0]
            boxes = np.array(relative).reshape(-1, 4) * np.array([*size, *size])
        return ObjectImage(
            image,
            size[0],
            size[1],
            boxes,
            np.array([self._label[row.category_id] for row, _ in objects], dtype=np.int64),
            np.array([_area(row, corners) for row, corners in objects], dtype=np.float64),
            np.array([bool(row.iscrowd) for row, _ in objects], dtype=bool),
            where,
        )

    def _by_image(
        self, annotations: Iterable[_Object], faults: dict[str, list[str]]
    ) -> dict[Any, list[tuple[_Object, Corners]]]:
        """Return the objects with a box in their image, and the clipped box, by image id."""
        # An unknown side is that of the stored image, which only `read` knows.
        sizes = {
            image.id: (image.width or sys.maxsize, image.height or sys.maxsize)
            for image in self._images
        }
        objects = defaultdict(list)
        for row in annotations:
            name = "annotation" if row.id is None else f"annotation {row.id}"
            if row.image_id not in sizes:
                faults["of an image that the file lacks"].append(f"{name} of {row.image_id}")
            elif row.category_id not in self._label:
                faults["of a category that the file lacks"].append(f"{name} of {row.category_id}")
            else:
                kind, corners = clip_box(row.bbox, sizes[row.image_id])
                if kind is not None:
                    faults[kind].append(f"{name} {list(row.bbox)} of image {row.image_id}")
                if corners is not None:
                    objects[row.image_id].append((row, corners))
        return dict(objects)


class _ImageFiles:
    """Images in a folder or an uncompressed tar file, by the file names of annotations."""

    def __init__(self, root: Path, file_names: Sequence[str]) -> None:
        self._root = root
        self._file_names = [_normalise_name(name) for name in file_names]
        self._members: dict[str, Member] | None = None
        if root.is_file():
            members, problem = read_members(root, MAX_ARCHIVE_MEMBERS)
            if problem is not None:
                raise ConfigError(f"{root}: {problem}; images need a folder or a plain tar file")
            self._members = {member.name.removeprefix("./"): member for member in members}
        elif not root.is_dir():
            raise ConfigError(f"{root}: there is neither a folder nor a tar file of images")

    def read(self, file_name: str, where: str) -> bytes:
        """Read an encoded image; raises BadSample for a missing image and an ambiguous name."""
        name = _normalise_name(file_name)
        if ".." in name.split("/"):
            raise BadSample("missing image", f"{where}: outside {self._root}")
        try:
            path = self._find(name, where)
            if self._members is None:
                return (self._root / path).read_bytes()
            member = self._members[path]
            with self._root.open("rb") as tar:
                tar.seek(member.offset)
                return tar.read(member.size)
        # ValueError: the name holds a null byte.
        except (KeyError, OSError, ValueError) as error:
            raise BadSample("missing image", f"{where}: not in {self._root}") from error

    def _find(self, name: str, where: str) -> str:
        """Return the path of a name in the folder or tar file, "" if there is no such file."""
        if self._members is None:
            exists = not name.startswith("/") and (self._root / name).is_file()
        else:
            exists = name in self._members
        path = name if exists else self._paths.find(name)
        if not exists and path in self._paths.ambiguous:
            raise BadSample("image of several names", f"{where}: {path} in {self._root}")
        return path or ""

    @cached_property
    def _paths(self) -> FileNames:
        # Listing a large folder takes long: only the first name that does not exist needs it.
        root = self._root.resolve()
        if self._members is not None:
            files = {name: f"{root.with_suffix('')}/{name}" for name in self._members}
        else:
            walk = (Path(folder) / file for folder, _, files in os.walk(root) for file in files)
            files = {str(file.relative_to(root)): str(file) for file in walk}
        paths = FileNames({name: path for name, path in files.items() if not is_hidden(name)})
        # Look up all names, so that `ambiguous` does not depend on the order of reading.
        for name in self._file_names:
            paths.find(name)
        return paths


# Images and their objects by number, 0 to len - 1; `read` raises BadSample.
ObjectImages = SceneImages | CocoImages


def _normalise_name(name: str) -> str:
    return name.replace("\\", "/").removeprefix("./")


def _id_order(row: _Image | _Category) -> tuple[bool, Any]:
    """Return a sort key: numbers come before strings, which do not compare with them."""
    return isinstance(row.id, str), row.id


def _area(annotation: _Object, corners: Corners) -> float:
    # Exporters without masks write 0, or nothing.
    if annotation.area is not None and annotation.area > 0:
        return annotation.area
    return (corners[2] - corners[0]) * (corners[3] - corners[1])


def _summary(faults: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{len(cases)} {kind}: {cases[0]}" for kind, cases in faults.items())


def _read_annotations(file: Path) -> dict[str, list[Any]]:
    try:
        content = parse_json(file.read_bytes(), "replace")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON ({error})") from error
    parts = ("images", "annotations", "categories")
    for part in parts:
        if not isinstance(content, dict) or not isinstance(content.get(part), list):
            raise ConfigError(f"{file}: no list {part!r}; is it an instances file of COCO?")
    return {part: content[part] for part in parts}


def _rows(
    file: Path,
    content: dict[str, list[Any]],
    part: str,
    row_class: type[AnyRow],
    faults: dict[str, list[str]],
) -> list[AnyRow]:
    """Return the valid rows of a list and add the others to `faults`.

    Invalid optional fields are dropped and are faults, too. ConfigError if all rows are invalid.
    """
    rows, invalid = [], []
    optional = {name for name, field in row_class.model_fields.items() if not field.is_required()}
    for number, row in enumerate(content[part]):
        try:
            rows.append(row_class.model_validate(row))
        except ValidationError as error:
            problem = error.errors()[0]
            location = ".".join(map(str, (f"{part}[{number}]", *problem["loc"])))
            fields = {str(problem["loc"][0]) for problem in error.errors() if problem["loc"]}
            if fields and fields <= optional:
                valid = {name: value for name, value in row.items() if name not in fields}
                rows.append(row_class.model_validate(valid))
                faults["fields that are invalid and left out"].append(location)
            else:
                invalid.append(f"{location} {problem['msg']}")
    if invalid and not rows:
        raise ConfigError(f"{file}: {invalid[0]}; is it an instances file of COCO?")
    if invalid:
        faults["rows of another layout"] += invalid
    return rows


def _drop_unused(
    categories: Sequence[_Category], annotations: Sequence[_Object]
) -> list[_Category]:
    """Return categories by id, without unused ones (no objects) with a used category's name."""
    # Roboflow adds a root category, without objects, that may have the name of a class.
    used_ids = {annotation.category_id for annotation in annotations}
    used_names = {row.name for row in categories if row.id in used_ids}
    rows = [row for row in categories if row.id in used_ids or row.name not in used_names]
    return sorted(rows, key=_id_order)


def _require_unique(file: Path, fault: str, values: Sequence[Any]) -> None:
    if duplicates := [value for value, count in Counter(values).items() if count > 1]:
        duplicates.sort(key=str)
        raise ConfigError(f"{file}: {fault}: {', '.join(map(str, duplicates[:5]))}")


DETR_SIZES = tuple(range(480, 801, 32))


class DetectionDataConfig(NormalisationConfig, MapDatasetConfig):
    """Images with boxes, and the sizes to which they are resized, by default DETR's.

    The aspect ratio stays, up to rounding to multiples of `multiple`. Scenes are rendered at the
    largest size.
    """

    train: ObjectSource = Field(description="images to train on, of one `format`")
    test: ObjectSource = Field(description="images to evaluate on, of one `format`")
    sizes: tuple[PositiveInt, ...] = Field(
        DETR_SIZES, min_length=1, description="shorter sides in pixels; each visit draws one"
    )
    test_sizes: tuple[PositiveInt, ...] = Field(
        (), description="shorter sides in evaluation; empty: the largest of `sizes`"
    )
    longest: int = Field(1333, ge=1, description="largest longer side in pixels")
    multiple: int = Field(
        32, ge=1, description="sides are multiples of this number of pixels, the backbone's stride"
    )
    hflip: bool = Field(True, description="horizontal flip with probability 0.5")
    crop: float = Field(0.0, ge=0, le=1, description="probability of a random crop; DETR: 0.5")
    crop_sides: CropScale = Field(
        (0.64, 1.0),
        description="least and largest share of each side that a crop keeps; DETR: 384 to 600 px",
    )

    @property
    def evaluation_sizes(self) -> tuple[int, ...]:
        """Return the shorter sides in evaluation."""
        return self.test_sizes or (max(self.sizes),)

    @property
    def shapes_differ(self) -> bool:
        """Return whether some images are not square; uncropped scenes are square."""
        scenes = isinstance(self.train, SceneSource) and isinstance(self.test, SceneSource)
        return not scenes or self.crop > 0

    @property
    def largest_side(self) -> int:
        """Return the largest longer side in training, in pixels."""
        side = self.longest if self.shapes_differ else max(self.sizes)
        return fit_size(side, side, side, self.longest, self.multiple)[0]

    @model_validator(mode="after")
    def _require_sizes(self) -> DetectionDataConfig:
        for size in (*self.sizes, *self.test_sizes):
            if not self.multiple <= size <= self.longest:
                raise ValueError(
                    f"size {size} must be at least `multiple` {self.multiple} and at most "
                    f"`longest` {self.longest}"
                )
        train, test = (
            source.annotations and os.path.realpath(source.annotations)
            if isinstance(source, CocoSource)
            else f"scenes {source.split}, seed {source.seed}"
            for source in (self.train, self.test)
        )
        if train == test:
            warn_of_training_data(train, test)
        return self


class DetectionBatch(NamedTuple):
    """B images of different sizes with their objects; no image if all samples are bad."""

    # B tensors (3, height, width) float32, normalised
    pixels: tuple[Tensor, ...]
    # B tensors (objects, 4) float32: centre x, y, width, height as shares of the image
    boxes: tuple[Tensor, ...]
    # B tensors (objects,) int64
    labels: tuple[Tensor, ...]
    # (B,) bool
    valid: Tensor
    skipped: tuple[SkippedSample, ...] = ()

    def to(self, device: torch.device | str) -> DetectionBatch:
        """Move every tensor to `device`."""
        return to_device(self, device)


class DetectionSample(NamedTuple):
    """One image of a `DetectionBatch`."""

    pixels: Tensor
    boxes: Tensor
    labels: Tensor


def open_objects(
    source: CocoSource | SceneSource, image_size: int, classes: Sequence[str] | None = None
) -> ObjectImages:
    """Open a source of images; scenes have sides of `image_size` pixels.

    `classes` are names in the order of training; None takes the source's.
    """
    if isinstance(source, CocoSource):
        return CocoImages(source, classes)
    scenes = SceneImages(source, image_size)
    if classes is not None and tuple(classes) != scenes.classes:
        raise ConfigError(
            f"scenes have the classes {', '.join(scenes.classes)}, but the model was trained on "
            f"{', '.join(classes[:5])}"
        )
    return scenes


def fit_size(
    width: int, height: int, shortest: int, longest: int, multiple: int
) -> tuple[int, int]:
    """Return the width and height in pixels to which an image is resized.

    The shorter side becomes `shortest`, or less if the longer side would exceed `longest`; both are
    rounded to multiples of `multiple`.
    """
    # With multiples few shapes are possible, so that more images of a batch have the same shape.
    scale = min(shortest / min(width, height), longest / max(width, height))
    limit = max(longest // multiple, 1)
    cells = (min(max(round(scale * side / multiple), 1), limit) for side in (width, height))
    new_width, new_height = (count * multiple for count in cells)
    return new_width, new_height


class DetectionSamples:
    """Training samples: images with crop, size and flip, and at most `max_objects` objects each."""

    def __init__(self, images: ObjectImages, config: DetectionDataConfig, max_objects: int) -> None:
        self.images, self.config, self.max_objects = images, config, max_objects
        self._preprocessing = Preprocessing(max(config.sizes), config.mean, config.std)

    def __call__(self, number: int, rng_for: RngFactory) -> DetectionSample:
        """Read and augment image `number`; raises BadSample."""
        config, sample = self.config, self.images.read(number)
        # As in DETR, crowds are no targets.
        image, labels = sample.image, sample.labels[~sample.crowds]
        # Left, top, right and bottom as shares of the image.
        boxes = sample.boxes[~sample.crowds] / np.array([sample.width, sample.height] * 2, float)
        rng = rng_for("crop")
        if rng.random() < config.crop:
            image, boxes, labels = _crop(image, boxes, labels, config.crop_sides, rng)
        if len(labels) > self.max_objects:
            raise BadSample(
                "more objects than queries",
                f"{sample.where}: {len(labels)} objects, {self.max_objects} queries",
            )
        shortest = config.sizes[int(rng_for("size").integers(len(config.sizes)))]
        image = _resize(image, shortest, config)
        if config.hflip and rng_for("mirror").random() < 0.5:
            image = ImageOps.mirror(image)
            boxes = np.stack([1 - boxes[:, 2], boxes[:, 1], 1 - boxes[:, 0], boxes[:, 3]], -1)
        centres, sides = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
        return DetectionSample(
            self._preprocessing.normalise(image),
            torch.from_numpy(np.concatenate([centres, sides], -1)).float(),
            torch.from_numpy(labels),
        )


def evaluation_pixels(sample: ObjectImage, size: int, config: DetectionDataConfig) -> Tensor:
    """Prepare an image for evaluation, its shorter side `size`: (3, height, width) float32."""
    image = _resize(sample.image, size, config)
    return Preprocessing(size, config.mean, config.std).normalise(image)


def collate(samples: list[DetectionSample], skipped: tuple[SkippedSample, ...]) -> DetectionBatch:
    """Return a batch of good samples, which may be none, and of skipped ones."""
    return DetectionBatch(
        tuple(sample.pixels for sample in samples),
        tuple(sample.boxes for sample in samples),
        tuple(sample.labels for sample in samples),
        torch.ones(len(samples), dtype=torch.bool),
        skipped,
    )


def _resize(image: Image.Image, shortest: int, config: DetectionDataConfig) -> Image.Image:
    size = fit_size(image.width, image.height, shortest, config.longest, config.multiple)
    return image if image.size == size else image.resize(size, Image.Resampling.BILINEAR)


def _crop(
    image: Image.Image,
    boxes: np.ndarray,
    labels: np.ndarray,
    sides: tuple[float, float],
    rng: np.random.Generator,
) -> tuple[Image.Image, np.ndarray, np.ndarray]:
    """Crop an image at random; clip its boxes, and drop the boxes outside.

    Boxes are (objects, 4): left, top, right, bottom as shares of the image, then of the crop.
    """
    size = np.array(image.size)
    crop_size = np.maximum(np.rint(size * rng.uniform(*sides, 2)), 1).astype(int)
    start = rng.integers(size - crop_size + 1)
    image = image.crop((*start.tolist(), *(start + crop_size).tolist()))
    boxes = np.clip((boxes * np.tile(size, 2) - np.tile(start, 2)) / np.tile(crop_size, 2), 0, 1)
    is_inside = (boxes[:, 2:] > boxes[:, :2]).all(-1)
    return image, boxes[is_inside], labels[is_inside]
