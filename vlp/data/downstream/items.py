"""A flat list of the items of shard folders: samples, or the questions or captions in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vlp.config import ConfigError
from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import BadSample, RawSample
from vlp.data.shards.shard_index import ShardIndex

Parts = Callable[[Annotation], int]
"""Function from an annotation to the number of items of its sample."""


class Item(NamedTuple):
    """One item: its sample, its number within the sample, and its location for messages."""

    raw: RawSample
    part: int
    where: str

    def without_images(self) -> Item:
        """Return what is left once its images are decoded."""
        return self._replace(raw=self.raw._replace(image=b"", second_image=None))


class Items:
    """Items of shard folders, in their order, by number.

    Args:
        folders: shard folders.
        parts: items of a sample; every annotation is read once to count them. A sample whose
            annotation cannot be read is one (bad) item. None: a sample is an item, nothing is read.
        limit: only the first so many items.

    Raises:
        ConfigError: a folder or its index cannot be read, there is no folder or no item, or a limit
            is below 1.
    """

    def __init__(
        self,
        folders: Sequence[str | Path],
        parts: Parts | None = None,
        limit: int | None = None,
    ) -> None:
        if not folders:
            raise ConfigError("no shard folder is given")
        if limit is not None and limit < 1:
            raise ConfigError(f"limit {limit}: at least one item is needed")
        self.folders = tuple(str(folder) for folder in folders)
        self.indices = [ShardIndex.open(folder) for folder in folders]
        self._shards = [
            (folder, number)
            for folder, index in enumerate(self.indices)
            for number in range(len(index.shards))
        ]
        samples = [self.indices[folder].shards[number].samples for folder, number in self._shards]
        self._first = np.concatenate([[0], np.cumsum(samples, dtype=np.int64)])
        # Where each sample's items end; without parts a sample's number is its item's.
        self._ends = None if parts is None else self._count(parts)
        total = int(self._first[-1]) if self._ends is None else int(self._ends[-1])
        if not total:
            raise ConfigError(
                f"{', '.join(self.folders)}: there is nothing to read in these shards"
            )
        self._length = total if limit is None else min(limit, total)

    def __len__(self) -> int:
        return self._length

    def read(self, number: int) -> Item:
        """Read one item.

        Raises:
            BadSample: its sample cannot be read.
            IndexError: there is no item of that number.
        """
        folder, shard, sample, part = self.place(number)
        index = self.indices[folder]
        raw = index.read(shard, sample)
        return Item(raw, part, f"{index.folder / index.shards[shard].name}, {raw.key}")

    def place(self, number: int) -> tuple[int, int, int, int]:
        """Return (folder, shard, sample, part) of an item.

        Raises:
            IndexError: there is no item of that number.
        """
        if not 0 <= number < self._length:
            raise IndexError(f"there are {self._length} items, none at {number}")
        sample, part = number, 0
        if self._ends is not None:
            sample = int(np.searchsorted(self._ends, number, side="right"))
            part = number - (int(self._ends[sample - 1]) if sample else 0)
        position = int(np.searchsorted(self._first, sample, side="right")) - 1
        return *self._shards[position], sample - int(self._first[position]), part

    def _count(self, parts: Parts) -> np.ndarray:
        counts = np.zeros(int(self._first[-1]), dtype=np.int64)
        for (folder, number), first in zip(self._shards, self._first):
            index = self.indices[folder]
            for sample in range(index.shards[number].samples):
                try:
                    counts[first + sample] = parts(index.read_annotation(number, sample))
                except BadSample:
                    counts[first + sample] = 1
        return np.cumsum(counts)
