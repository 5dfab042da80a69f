"""Images with a class each, from shards, class folders or tars of those, as one list."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

from PIL import Image

from evaluation.core.samples import EvaluationError
from evaluation.downstream.blocks import image_name
from evaluation.zeroshot.prompts import Prompts
from vlp.data.downstream.items import Items
from vlp.data.image.decode import decode_image
from vlp.data.labelled_images import LabelledImages, open_labelled
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.shard_index import INDEX_NAME

LABEL = "label"


class Classed(NamedTuple):
    """An image, the number of its class, its key (or file), and what equal images share."""

    image: Image.Image | None
    label: int
    key: str
    image_id: str

    def without_images(self) -> Classed:
        """Return what is left once the image is prepared."""
        return self._replace(image=None)


class _Source(Protocol):
    def __len__(self) -> int: ...

    def read(self, number: int) -> Classed: ...


class ClassedImages:
    """Images of several places, by number.

    Args:
        paths: shard folders, folders of class folders, or tar files of such.
        prompts: the classes.
        label_field: of the annotations in shards.
        limit: only the first so many images.

    Raises:
        EvaluationError: a limit below 1, or no place is given.
        ConfigError: a place cannot be read, or has folders of other classes.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        prompts: Prompts,
        label_field: str = LABEL,
        limit: int | None = None,
    ) -> None:
        if not paths:
            raise EvaluationError("no shard folder is given")
        if limit is not None and limit < 1:
            raise EvaluationError(f"limit {limit}: at least one image is needed")
        self.folders = tuple(map(str, paths))
        numbers = {label: number for number, label in enumerate(prompts.labels)}
        self._sources: list[_Source] = [
            _FromFolders(open_labelled(path, prompts.labels))
            if Path(path).is_file() or not _indexed(path)
            else _LabelledShards(path, numbers, label_field)
            for path in self.folders
        ]
        self._ends = list(accumulate(map(len, self._sources)))
        self._length = self._ends[-1] if limit is None else min(limit, self._ends[-1])

    def __len__(self) -> int:
        return self._length

    def read(self, number: int) -> Classed:
        """One of them.

        Raises:
            BadSample: it cannot be decoded, or has no known class.
        """
        source = bisect_right(self._ends, number)
        return self._sources[source].read(number - (self._ends[source - 1] if source else 0))


def _indexed(path: str) -> bool:
    folder = Path(path)
    # Shards without an index: the index's own message tells how to make one.
    return (folder / INDEX_NAME).is_file() or any(folder.glob("*.tar"))


class _FromFolders:
    def __init__(self, images: LabelledImages) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def read(self, number: int) -> Classed:
        image, label, where = self._images.read(number)
        return Classed(image, label, where, where)


class _LabelledShards:
    def __init__(self, path: str, numbers: dict[str, int], field: str) -> None:
        self._items = Items([path])
        self._numbers, self._field = numbers, field

    def __len__(self) -> int:
        return len(self._items)

    def read(self, number: int) -> Classed:
        item = self._items.read(number)
        label = getattr(item.raw.annotation, self._field, None)
        if label is None:
            raise BadSample("no class", f"{item.where}: it has no `{self._field}`")
        if str(label) not in self._numbers:
            raise BadSample("unknown class", f"{item.where} ({self._field} {label!r})")
        image = decode_image(item.raw.image, item.where)
        return Classed(image, self._numbers[str(label)], item.raw.key, image_name(item))
