"""Search for images that repeat an earlier one, by their hashes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_tools.dedup.near_duplicates import Places, Sorting, pairs_of_sorting, sortings
from data_tools.dedup.perceptual_hash import (
    FINE_DISTANCE,
    READABLE,
    UNREADABLE,
    Hashes,
    fine_distance,
)
from data_tools.executor.executor import Executor, go_on
from data_tools.executor.local import LocalExecutor

ALONE = LocalExecutor(1)
_WORTH_TASKS = 50_000


class Drops(NamedTuple):
    """Images to drop: `kept[i]` is the one that stays in place of `dropped[i]`."""

    dropped: Places
    kept: Places


def duplicate_images(
    images: NDArray[np.void],
    distance: int | None,
    executor: Executor = ALONE,
    folder: Path | None = None,
) -> Drops:
    """Find the images that repeat an earlier one.

    An image is dropped if it has the same bytes as an earlier one, or looks like an earlier one
    that is kept; one that looks like a dropped one alone stays. (Among those that share all 64 bits
    it goes too, for the sake of the dropped one.)

    Args:
        images: RECORDs in order of preference; the second images of samples, and the first ones
            beside them, are left out of account.
        distance: bits of 64, or None for equal bytes only.
        executor: searches many images for near ones, a task for each sorting of some millions.
        folder: where tasks find the hashes meanwhile; None: a temporary one of this machine.
    """
    paired = images["second"].copy()
    paired[:-1] |= images["second"][1:]
    usable = np.flatnonzero(~paired & (images["state"] != UNREADABLE))
    kept_for = np.arange(len(images))
    _keep_first(images["bytes"], usable, kept_for)
    if distance is not None:
        usable = usable[kept_for[usable] == usable]
        textured = usable[images["state"][usable] == READABLE]
        _keep_first(_looks(images), textured, kept_for)
        textured = textured[kept_for[textured] == textured]
        _join_equal_hashes(images, textured, kept_for)
        textured = textured[kept_for[textured] == textured]
        if len(textured) < _WORTH_TASKS:
            executor = ALONE
        _join_near_hashes(images, textured, distance, kept_for, executor, folder)
        while (kept_for[kept_for] != kept_for).any():
            kept_for = kept_for[kept_for]
    dropped = np.flatnonzero(kept_for != np.arange(len(images)))
    return Drops(dropped, kept_for[dropped])


def _keep_first(values: Hashes, among: Places, kept_for: Places) -> None:
    """Keep the first of equal values for the others."""
    _, first, inverse = np.unique(values[among], return_index=True, return_inverse=True)
    kept_for[among] = among[first[inverse.reshape(-1)]]


def _looks(images: NDArray[np.void]) -> Hashes:
    """Return all 320 bits of the perceptual hashes mixed into 64; equal ones stay equal."""
    mixed = images["coarse"].copy()
    for word in range(4):
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= images["fine"][:, word]
    return mixed


def _join_equal_hashes(images: NDArray[np.void], among: Places, kept_for: Places) -> None:
    """Keep the first of those with the same 64 bits and near 256 bits.

    One by one, not in pairs: thousands of copies of one image would make millions of pairs.
    """
    coarse = images["coarse"][among]
    order = np.argsort(coarse, kind="stable")
    starts = np.flatnonzero(np.diff(coarse[order], prepend=~coarse[order[:1]]))
    ends = np.append(starts[1:], len(order))
    several = ends - starts > 1
    for start, end in zip(starts[several], ends[several]):
        group = among[order[start:end]]
        while len(group) > 1:
            fine = images["fine"][group]
            near = fine_distance(fine[:1], fine) <= FINE_DISTANCE
            kept_for[group[near]] = group[0]
            group = group[~near]


def _join_near_hashes(
    images: NDArray[np.void],
    among: Places,
    distance: int,
    kept_for: Places,
    executor: Executor,
    folder: Path | None,
) -> None:
    edges = [np.empty((2, 0), np.int64)]
    with TemporaryDirectory(prefix="near-", dir=folder) as name:
        for column in ("coarse", "fine"):
            np.save(Path(name, f"{column}.npy"), images[column][among])
        search = partial(_near_of_sorting, Path(name), distance)
        tasks = sortings(distance, len(among))
        edges.extend(among[places] for places in executor.map(search, tasks))
    first, second = np.concatenate(edges, axis=1)
    # Earlier images are decided upon before later ones look at them.
    for place in np.lexsort((first, second)):
        one, other = first[place], second[place]
        if kept_for[other] == other and kept_for[one] == one:
            kept_for[other] = one


def _near_of_sorting(folder: Path, distance: int, task: Sorting) -> Places:
    """Return the pairs that one task finds and 256 bits confirm, (2, pairs)."""
    coarse, fine = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("coarse", "fine"))
    found = [np.empty((2, 0), np.int64)]
    for pairs in pairs_of_sorting(np.asarray(coarse), distance, task):
        go_on()
        near = fine_distance(fine[pairs.first], fine[pairs.second]) <= FINE_DISTANCE
        found.append(np.stack((pairs.first[near], pairs.second[near])))
    return np.concatenate(found, axis=1)
