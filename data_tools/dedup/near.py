"""Images that repeat others: exact duplicates by their bytes, near ones by bands of their hash.

Cut 64 bits into `distance + k` bands: hashes that differ in at most `distance` bits agree in at
least k whole bands. So for each choice of k bands, sort by those and compare within equal ones
only. Any k finds the same pairs. Manku, Jain, Das Sarma, "Detecting near-duplicates for web
crawling", 2007.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from data_tools.dedup.hashes import (
    DISTANCE,
    FINE_DISTANCE,
    READABLE,
    UNREADABLE,
    Hashes,
    Places,
    differing_bits,
    fine_distance,
)
from data_tools.executor import go_on

_COMPARED_AT_ONCE = 1 << 18
_MOST_BANDS = 2000
_SORTING_COST = 6.0
"""Comparisons that sorting a hash takes as long as; measured."""
# Bits by diagonals of the 8 x 8 cosines: neighbours in a row or a column depend on each other, and
# a band of those tells less.
_SCATTERED = sorted(range(64), key=lambda bit: ((bit // 8 - bit) % 8, bit))


class Drops(NamedTuple):
    """Images to drop: `kept[i]` is the one that stays in place of `dropped[i]`."""

    dropped: Places
    kept: Places


def near_pairs(
    stored: Hashes, distance: int, asked: Hashes | None = None
) -> Iterator[tuple[Places, Places]]:
    """Yield all pairs of 64-bit hashes within `distance` (0 to 32) bits, each once.

    They are places in `asked` and in `stored`; without `asked` the earlier and the later place.
    """
    masks = band_masks(distance, best_k(distance, len(stored)))
    for number, mask in enumerate(masks):
        order = np.argsort(stored & mask, kind="stable")
        value = stored[order]
        queries = value if asked is None else asked
        names = order if asked is None else np.arange(len(queries))
        first = np.searchsorted(value & mask, queries & mask, side="left")
        last = np.searchsorted(value & mask, queries & mask, side="right")
        if asked is None:
            first = np.arange(1, len(value) + 1)  # each with those behind it
        for start in range(0, len(queries), _COMPARED_AT_ONCE):
            some = slice(start, start + _COMPARED_AT_ONCE)
            here = start + np.flatnonzero(first[some] < last[some])
            there = first[here]
            while len(here):
                go_on()
                different = queries[here] ^ value[there]
                near = differing_bits(queries[here], value[there]) <= distance
                for earlier in masks[:number]:  # has found those that agree there
                    near &= (different & earlier) != 0
                if near.any():
                    one, other = names[here[near]], order[there[near]]
                    if asked is None:
                        one, other = np.minimum(one, other), np.maximum(one, other)
                    yield one, other
                there = there + 1
                here, there = here[there < last[here]], there[there < last[here]]


def band_masks(distance: int, k: int) -> list[np.uint64]:
    """Return the bits of each choice of k bands; near hashes agree in at least one of them."""
    bounds = np.linspace(0, 64, distance + k + 1).astype(int)
    parts = [sum(1 << bit for bit in _SCATTERED[start:end]) for start, end in pairwise(bounds)]
    return [np.uint64(sum(chosen)) for chosen in combinations(parts, k)]


def best_k(distance: int, count: int) -> int:
    """Return the k with which a search among `count` random hashes costs least."""

    def cost(k: int) -> float:
        agreeing = count * 2.0 ** (-64 * k / (distance + k))
        return comb(distance + k, k) * (_SORTING_COST + agreeing / 2)

    choices = range(1, 65 - distance)
    return min((k for k in choices if k == 1 or comb(distance + k, k) <= _MOST_BANDS), key=cost)


def usable_images(records: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return which images are compared: those that can be decoded and are alone in their sample."""
    paired = records["second"].copy()
    paired[:-1] |= records["second"][1:]
    usable: NDArray[np.bool_] = ~paired & (records["state"] != UNREADABLE)
    return usable


def duplicate_images(records: NDArray[np.void], distance: int | None) -> Drops:
    """Find the images that repeat an earlier one among RECORDs in order of preference.

    An image is dropped if it has the same bytes as an earlier one, or looks like an earlier one
    that is kept, within `distance` bits of 64; one that looks like a dropped one alone stays.
    (Among those that share all 64 bits it goes too, for the sake of the dropped one.)
    """
    among = np.flatnonzero(usable_images(records))
    links = [_to_first(records["bytes"][among], among)]
    if distance is not None:
        among = np.setdiff1d(among, links[0][0])
        among = among[records["state"][among] == READABLE]
        links.append(_same_coarse(records, among))
        among = np.setdiff1d(among, links[1][0])
        near = [np.empty((2, 0), np.int64), *_near_places(records, among, distance)]
        links.append(_first_kept(np.concatenate(near, axis=1)))
    return _resolved(np.concatenate(links, axis=1))


def alike_groups(records: NDArray[np.void], distance: int = DISTANCE) -> Places:
    """Return the number of each image's group; images that cannot be read are alone.

    Unlike `duplicate_images`, which keeps what looks like a dropped image alone, a chain of images
    is one group: what is dealt by groups has no two alike images on two sides.
    """
    usable = np.flatnonzero(records["state"] != UNREADABLE)
    links = [_to_first(records["bytes"][usable], usable)]
    textured = usable[records["state"][usable] == READABLE]
    looks = np.column_stack((records["coarse"][textured], records["fine"][textured]))
    looks = np.ascontiguousarray(looks).view(f"V{looks.itemsize * 5}").reshape(-1)
    # Equal hashes count once: thousands of copies of an image would make millions of pairs.
    links.append(_to_first(looks, textured))
    links += _near_places(records, np.setdiff1d(textured, links[1][0]), distance)
    first, second = np.concatenate(links, axis=1)
    shape = len(records), len(records)
    graph = coo_array((np.ones(len(first), np.int8), (first, second)), shape)
    groups: Places = connected_components(graph, directed=False)[1].astype(np.int64)
    return groups


def _near_places(records: NDArray[np.void], among: Places, distance: int) -> Iterator[Places]:
    """Yield pairs of images that look alike, (2, pairs), the earlier one first."""
    fine = records["fine"]
    for one, other in near_pairs(records["coarse"][among], distance):
        first, second = among[one], among[other]
        alike = fine_distance(fine[first], fine[second]) <= FINE_DISTANCE
        yield np.stack((first[alike], second[alike]))


def _to_first(values: NDArray[np.generic], among: Places) -> Places:
    """Link the others of equal values to their first one: (2, links)."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    links = np.stack((among, among[first[inverse.reshape(-1)]]))
    return links[:, links[0] != links[1]]


def _same_coarse(records: NDArray[np.void], among: Places) -> Places:
    """Keep the first of those with the same 64 bits and near 256 bits: (2, links).

    One by one, not in pairs: thousands of copies of one image would make millions of pairs.
    """
    order = among[np.argsort(records["coarse"][among], kind="stable")]
    _, starts = np.unique(records["coarse"][order], return_index=True)
    found = [np.empty((2, 0), np.int64)]
    for start, end in pairwise([*starts, len(order)]):
        group = order[start:end]
        while len(group) > 1:
            go_on()
            fine = records["fine"][group]
            near = fine_distance(fine[:1], fine) <= FINE_DISTANCE
            found.append(np.stack((group[near], np.full(near.sum(), group[0])))[:, 1:])
            group = group[~near]
    return np.concatenate(found, axis=1)


def _first_kept(pairs: Places) -> Places:
    """Decide which images go, (2, links), of pairs that look alike."""
    # Earlier images are decided upon before later ones look at them.
    first, second = pairs[:, np.lexsort((pairs[0], pairs[1]))].tolist()
    links: dict[int, int] = {}
    for one, other in zip(first, second):
        if one not in links:
            links.setdefault(other, one)
    return np.array([[*links], [*links.values()]], np.int64)


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
