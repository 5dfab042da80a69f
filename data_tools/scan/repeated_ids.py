"""Search for repeats among very many names, in bounded memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.uint64]

_PARTS = 256


def number_of(name: str) -> int:
    """Hash a name to 64 bits; among a billion names two share one with a chance of 3 %."""
    digest = blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def numbers_of(names: Iterable[str]) -> Numbers:
    """Return `number_of` each name."""
    return np.fromiter((number_of(name) for name in names), dtype=np.uint64)


class Repeated(NamedTuple):
    """Number of different numbers, and those of them that came more than once (sorted)."""

    distinct: int
    values: Numbers


class RepeatedIds:
    """Collects numbers; beyond `limit` of them they wait in files of a temporary folder.

    Numbers are dealt to 256 files by their upper bits, so that one file after the other fits in
    memory: a billion numbers need 8 GB of disk and some 100 MB of memory.
    """

    def __init__(self, limit: int = 1 << 22) -> None:
        self._limit = limit
        self._held: list[Numbers] = []
        self._count = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def add(self, numbers: Numbers) -> None:
        """Add numbers, in any order."""
        self._held.append(numbers)
        self._count += len(numbers)
        if self._count > self._limit:
            self._spill()

    def result(self) -> Repeated:
        """Return the counts of what was added so far; the object is empty afterwards."""
        if self._folder is None:
            return _count([self._held_numbers()])
        self._spill()
        with self._folder as folder:
            self._folder = None
            files = sorted(Path(folder).iterdir())
            return _count(np.fromfile(file, dtype=np.uint64) for file in files)

    def _held_numbers(self) -> Numbers:
        numbers = np.concatenate(self._held) if self._held else np.empty(0, np.uint64)
        self._held, self._count = [], 0
        return numbers

    def _spill(self) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="repeats-")
        numbers = self._held_numbers()
        part = numbers >> np.uint64(64 - 8)
        order = np.argsort(part, kind="stable")
        bounds = np.searchsorted(part[order], np.arange(_PARTS + 1, dtype=np.uint64))
        for number, (start, end) in enumerate(pairwise(bounds)):
            if start < end:
                with open(Path(self._folder.name) / f"{number:03d}", "ab") as file:
                    numbers[order[start:end]].tofile(file)


def _count(parts: Iterable[Numbers]) -> Repeated:
    distinct, values = 0, [np.empty(0, np.uint64)]
    for part in parts:
        found, counts = np.unique(part, return_counts=True)
        distinct += len(found)
        values.append(found[counts > 1])
    return Repeated(distinct, np.concatenate(values))
