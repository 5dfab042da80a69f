"""Labelled images: class folders, tar files of class folders, and shards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence, Sized
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np
from PIL import Image

from vlp.config import ConfigError
from vlp.data.file_names import IMAGES, is_hidden, split_of
from vlp.data.image.decode import decode_image
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.shard_reader import INDEX_NAME, Items
from vlp.data.shards.tar import read_files


class LabelledImage(NamedTuple):
    """An RGB image, the index of its class, its location; in shards also key and image name."""

    image: Image.Image
    label: int
    where: str
    key: str = ""
    image_name: str = ""

    def without_images(self) -> LabelledImage:
        """Return a copy without the image, for after its preparation."""
        return self._replace(image=Image.new("RGB", (1, 1)))


class LabelledImages:
    """Base of map-style data sets of labelled images."""

    def __init__(self, items: Sized, classes: tuple[str, ...]) -> None:
        self._length, self.classes = len(items), classes
        self._class_index = {name: index for index, name in enumerate(classes)}

    def __len__(self) -> int:
        return self._length

    def read(self, number: int) -> LabelledImage:
        """Return image `number` (from 0) with its class; raises BadSample."""
        raise NotImplementedError


def open_labelled(
    path: str, classes: Sequence[str] | None = None, field: str = "label"
) -> LabelledImages:
    """Open a folder of class folders, a tar file of one (read into memory), or a folder of shards.

    In shards the class is a `field` of the annotation, or KEY.cls. `classes` gives their order;
    None sorts the folders' names and is refused for shards.
    """
    root = Path(path)
    if root.is_file():
        return _TarImages(root, classes)
    if not root.is_dir():
        raise ConfigError(f"{path}: there is neither a folder nor a tar file")
    if (root / INDEX_NAME).is_file() or any(root.glob("*.tar")):
        if classes is None:
            raise ConfigError(f"{path}: shards need `classes`, the names of their labels in order")
        return _ShardImages(root, classes, field)
    return _FolderImages(root, classes)


def require_images(path: str, classes: Sequence[str]) -> None:
    """Refuse class folders without images, as they would silently be missing from `classes`."""
    folder = Path(path)
    if not folder.is_dir() or (folder / INDEX_NAME).is_file():
        return
    names = {path.name for path in folder.iterdir() if path.is_dir() and not is_hidden(path.name)}
    if names & set(classes) and (empty := sorted(names - set(classes))):
        raise ConfigError(
            f"{path}: no images ({', '.join(IMAGES)}) in its class folders {', '.join(empty[:5])}; "
            "remove these, or name the classes in data.classes"
        )


def draw_subset(images: LabelledImages, limit: int | None, path: str) -> LabelledImages:
    """Draw `limit` images, the same for every seed; `path` is for messages."""
    if limit is None:
        return images
    if limit > len(images):
        raise ConfigError(f"data.limit {limit} is more than the {len(images)} images of {path}")
    return _Subset(images, np.random.default_rng(0).permutation(len(images))[:limit].tolist())


class _Subset(LabelledImages):
    def __init__(self, images: LabelledImages, numbers: Sequence[int]) -> None:
        super().__init__(numbers, images.classes)
        self._images, self._numbers = images, numbers

    def read(self, number: int) -> LabelledImage:
        return self._images.read(self._numbers[number])


class _FolderImages(LabelledImages):
    def __init__(self, folder: Path, classes: Sequence[str] | None) -> None:
        names = sorted(filter(_is_class_image, _relative_files(folder)))
        self._files = [folder / name for name in names]
        classes, self._labels = _class_names(names, classes, folder)
        super().__init__(self._files, classes)

    def read(self, number: int) -> LabelledImage:
        file = self._files[number]
        try:
            content = file.read_bytes()
        except OSError as error:
            raise BadSample("unreadable image", f"{file} ({error.strerror})") from error
        label = self._class_index[self._labels[number]]
        return LabelledImage(decode_image(content, str(file)), label, str(file))


class _TarImages(LabelledImages):
    def __init__(self, file: Path, classes: Sequence[str] | None) -> None:
        self._file = file
        # The last of several members of one name counts, as in unpacking.
        stored = read_files(file, _is_class_image)
        members = {PurePath(str(name).lstrip("/")): data for name, data in stored}
        self._members = list(members.items())
        classes, self._labels = _class_names(list(members), classes, file)
        super().__init__(self._members, classes)

    def read(self, number: int) -> LabelledImage:
        name, content = self._members[number]
        where = f"{self._file}, {name}"
        label = self._class_index[self._labels[number]]
        return LabelledImage(decode_image(content, where), label, where)


class _ShardImages(LabelledImages):
    def __init__(self, folder: Path, classes: Sequence[str], field: str) -> None:
        self._items, self._field = Items([folder]), field
        super().__init__(self._items, tuple(classes))

    def read(self, number: int) -> LabelledImage:
        raw = self._items.read(number).raw
        label = getattr(raw.annotation, self._field, None)
        if label is None:
            raise BadSample("no class", f"{raw.where}: it has no `{self._field}`")
        if str(label) not in self._class_index:
            raise BadSample("unknown class", f"{raw.where} ({self._field} {label!r})")
        image, index = decode_image(raw.image, raw.where), self._class_index[str(label)]
        return LabelledImage(image, index, raw.where, raw.key, raw.image_name)


def _relative_files(folder: Path) -> Iterator[PurePath]:
    """Yield the files of a folder and its subfolders, relative to it; links are followed."""
    for path, subfolders, names in os.walk(folder, followlinks=True):
        subfolders[:] = [name for name in subfolders if not _links_upwards(Path(path, name))]
        yield from (Path(path, name).relative_to(folder) for name in names)


def _links_upwards(path: Path) -> bool:
    """Return whether a folder is a link to one of its parents; such a walk would never end."""
    if not path.is_symlink():
        return False
    target = path.resolve()
    return any(parent.resolve() == target for parent in path.absolute().parents)


def _is_class_image(name: PurePath) -> bool:
    """Return whether a relative path is an image in a folder, without hidden parts."""
    is_image = name.suffix.lower() in IMAGES and len(name.parts) > 1
    return is_image and not is_hidden(name.as_posix())


def _class_names(
    paths: Sequence[PurePath], class_names: Sequence[str] | None, where: Path
) -> tuple[tuple[str, ...], list[str]]:
    """Return the classes, and each image's class by the first folder that differs."""
    if not paths:
        raise ConfigError(f"{where}: holds no images in class folders ({', '.join(IMAGES)})")
    common = os.path.commonpath([path.parent for path in paths])
    depth = len(PurePath(common).parts)
    if strays := [path for path in paths if str(path.parent) == common]:
        if class_names is None and len({path.parent for path in paths}) > 2:
            raise ConfigError(
                f"{where}: {strays[0]} lies beside folders of images; move it away, or name the "
                "classes in data.classes"
            )
        depth -= 1  # all images are of one class
    labels = []
    for path in paths:
        # With `class_names` any folder of the path may name the class; the folder at `depth` comes
        # first, as a parent may have the name of another class.
        parts = (path.parts[depth], *path.parts[:-1])
        labels.append(next((part for part in parts if part in (class_names or ())), parts[0]))
    classes = tuple(class_names or sorted(set(labels)))
    if unknown := sorted(set(labels) - set(classes)):
        raise ConfigError(f"{where}: unknown classes {', '.join(unknown[:5])}")
    if class_names is None and all(map(split_of, classes)):
        raise ConfigError(
            f"{where}: its class folders lie in {', '.join(classes[:3])}, which are splits; give "
            "the folder, or a tar file, of one split"
        )
    return classes, labels
