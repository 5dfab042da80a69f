"""Search for images that repeat an earlier one, by their hashes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_tools.dedup.image_columns import ImageColumns
from data_tools.dedup.near_duplicates import (
    HashPart,
    Places,
    Sorting,
    best_k,
    pairs_of_sorting,
    parts_of,
    places_of_part,
    sortings,
)
from data_tools.dedup.perceptual_hash import FINE_DISTANCE, fine_distance
from data_tools.executor.executor import Executor, go_on
from data_tools.executor.local import LocalExecutor

ALONE = LocalExecutor(1)
_WORTH_TASKS = 50_000
_SAMPLED = 1 << 18
_KEYS_AT_ONCE = 1 << 18


class Drops(NamedTuple):
    """Images to drop: `kept[i]` is the one that stays in place of `dropped[i]`."""

    dropped: Places
    kept: Places


def duplicate_images(
    images: ImageColumns, distance: int | None, executor: Executor = ALONE
) -> Drops:
    """Find the images that repeat an earlier one.

    An image is dropped if it has the same bytes as an earlier one, or looks like an earlier one
    that is kept; one that looks like a dropped one alone stays. (Among those that share all 64 bits
    it goes too, for the sake of the dropped one.)

    What is found is left out of `images`. All that grows with their number is done by tasks on
    parts of the columns; this process holds what they find.

    Args:
        images: in order of preference.
        distance: bits of 64, or None for equal bytes only.
        executor: searches many images, a task for some millions.
    """
    if len(images) < _WORTH_TASKS:
        executor = ALONE
    links = [_found(images, _same_bytes, executor)]
    images.leave_out(links[-1][0])
    if distance is not None:
        links.append(_found(images, _same_hashes, executor))
        images.leave_out(links[-1][0])
        links.append(_first_kept(_near_hashes(images, distance, executor)))
    return _resolved(np.concatenate(links, axis=1))


def kept_with_dropped_keys(images: ImageColumns, dropped: Places) -> int:
    """Count kept images with the key of a dropped one; `dropped` ascends."""
    if not len(dropped):
        return 0
    keys, shared = images["key"], 0
    gone = np.unique(keys[dropped])
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        some = np.array(keys[start : start + _KEYS_AT_ONCE])
        first, last = np.searchsorted(dropped, (start, start + _KEYS_AT_ONCE))
        # A sample's second image has its key too, but such samples are never dropped.
        stay = np.ones(len(some), bool)
        stay[dropped[first:last] - start] = False
        shared += int(np.isin(some[stay], gone).sum())
    return shared


def _found(
    images: ImageColumns, search: Callable[[Path, HashPart], Places], executor: Executor
) -> Places:
    """Return what a search of each part found, (2, links): dropped and kept images."""
    tasks = parts_of(len(images))
    return np.concatenate([*executor.map(partial(search, images.folder), tasks)], axis=1)


def _same_bytes(folder: Path, part: HashPart) -> Places:
    """Keep the first of equal bytes for the others."""
    images = ImageColumns(folder)
    among = places_of_part(images["bytes"], part, images["usable"])
    _, first, inverse = np.unique(images["bytes"][among], return_index=True, return_inverse=True)
    kept = among[first[inverse.reshape(-1)]]
    return np.stack((among, kept))[:, kept != among]


def _same_hashes(folder: Path, part: HashPart) -> Places:
    """Keep the first of those with the same 64 bits and near 256 bits.

    One by one, not in pairs: thousands of copies of one image would make millions of pairs.
    """
    images = ImageColumns(folder)
    all_fine = images["fine"]
    among = places_of_part(images["coarse"], part, images["textured"])
    coarse = images["coarse"][among]
    order = np.argsort(coarse, kind="stable")
    starts = np.flatnonzero(np.diff(coarse[order], prepend=~coarse[order[:1]]))
    ends = np.append(starts[1:], len(order))
    several = ends - starts > 1
    found = [np.empty((2, 0), np.int64)]
    for start, end in zip(starts[several], ends[several]):
        go_on()
        group = among[order[start:end]]
        while len(group) > 1:
            fine = all_fine[group]
            near = fine_distance(fine[:1], fine) <= FINE_DISTANCE
            found.append(np.stack((group[near], np.full(near.sum(), group[0])))[:, 1:])
            group = group[~near]
    return np.concatenate(found, axis=1)


def _near_hashes(images: ImageColumns, distance: int, executor: Executor) -> Places:
    """Return the pairs of images that look alike, (2, pairs), the earlier one first."""
    some = slice(None, None, max(1, len(images) // _SAMPLED))
    sample = images["coarse"][some][images["textured"][some]]
    tasks = sortings(distance, len(images), best_k(sample, distance, len(images)))
    search = partial(_near_of_sorting, images.folder, distance)
    return np.concatenate([*executor.map(search, tasks)], axis=1)


def _near_of_sorting(folder: Path, distance: int, task: Sorting) -> Places:
    """Return the pairs that one task finds and 256 bits confirm, (2, pairs)."""
    images = ImageColumns(folder)
    fine, found = images["fine"], [np.empty((2, 0), np.int64)]
    for pairs in pairs_of_sorting(images["coarse"], distance, task, images["textured"]):
        go_on()
        near = fine_distance(fine[pairs.first], fine[pairs.second]) <= FINE_DISTANCE
        found.append(np.stack((pairs.first[near], pairs.second[near])))
    return np.concatenate(found, axis=1)


def _first_kept(pairs: Places) -> Places:
    """Decide which images go, (2, links), of pairs that look alike; memory is that of the pairs."""
    images, places = np.unique(pairs, return_inverse=True)
    first, second = places.reshape(pairs.shape)
    # Earlier images are decided upon before later ones look at them.
    order = np.lexsort((first, second))
    dropped, chosen = bytearray(len(images)), bytearray(len(order))
    both = zip(memoryview(first[order]), memoryview(second[order]))
    for number, (one, other) in enumerate(both):
        if not dropped[other] and not dropped[one]:
            dropped[other] = chosen[number] = True
    links = order[np.frombuffer(chosen, np.bool_)]
    return np.stack((images[second[links]], images[first[links]]))


def _resolved(links: Places) -> Drops:
    """Follow links, each of another image, to images that are kept."""
    dropped, kept = links[:, np.argsort(links[0])]
    while len(dropped):
        place = np.minimum(np.searchsorted(dropped, kept), len(dropped) - 1)
        gone = dropped[place] == kept
        if not gone.any():
            break
        kept = np.where(gone, kept[place], kept)
    return Drops(dropped, kept)
