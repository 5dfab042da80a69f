"""Pairs of 64-bit hashes that differ in few bits, every one of them, without comparing all pairs.

Cut 64 bits into `distance + k` blocks: hashes that differ in at most `distance` bits agree in at
least k whole blocks. So for each choice of k blocks, sort by those blocks and compare within equal
ones only. More blocks (k) mean more sortings and fewer comparisons; which is best depends on how
many hashes there are. Manku, Jain, Das Sarma, "Detecting near-duplicates for web crawling", 2007.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_tools.dedup.perceptual_hash import Hashes, differing_bits

Places = NDArray[np.int64]

_MOST_TABLES = 2000
_MOST_AT_ONCE = 1 << 24
_COMPARED_AT_ONCE = 1 << 16
_MIX = np.uint64(0x9E3779B97F4A7C15)


class NearPairs(NamedTuple):
    """Places of hashes that are near each other, and in how many bits they differ."""

    first: Places
    second: Places
    distance: NDArray[np.int64]


class Sorting(NamedTuple):
    """A task of a search: which sorting, and which of how many parts of the hashes, a power of 2.

    A hash's part depends on the bits that are sorted by, so none agrees with one of another part.
    """

    number: int
    part: int = 0
    parts: int = 1


def sortings(distance: int, count: int) -> list[Sorting]:
    """Return the tasks of a search among `count` hashes, each of at most some 16 million."""
    parts = 1 << max(0, (count - 1) // _MOST_AT_ONCE).bit_length()
    numbers = range(len(block_masks(distance, count)))
    return [Sorting(number, part, parts) for number in numbers for part in range(parts)]


def near_pairs(hashes: Hashes, distance: int) -> Iterator[NearPairs]:
    """Yield every pair of places (first < second) of hashes within `distance` bits, once.

    Memory beside the hashes is that of one task; equal hashes, though, are all paired with each
    other, so many of them should be made one before.
    """
    for task in sortings(distance, len(hashes)):
        yield from pairs_of_sorting(hashes, distance, task)


def pairs_of_sorting(hashes: Hashes, distance: int, task: Sorting) -> Iterator[NearPairs]:
    """Yield the pairs of `near_pairs` that one task finds and none of an earlier sorting."""
    masks = block_masks(distance, len(hashes))
    mask = masks[task.number]
    order = _members(hashes, mask, task)
    order = order[np.argsort(hashes[order] & mask, kind="stable")]
    value = hashes[order]
    # Members of a block lie side by side: compare each with the next, the one after that, ...
    for start in range(0, len(order), _COMPARED_AT_ONCE):
        here = np.arange(start, min(start + _COMPARED_AT_ONCE, len(order)))
        for shift in range(1, len(order)):
            here = here[: np.searchsorted(here, len(order) - shift)]
            here = here[(value[here] ^ value[here + shift]) & mask == 0]
            if not len(here):
                break
            places, bits = _near(value[here], value[here + shift], distance, masks[: task.number])
            one, other = order[here[places]], order[here[places] + shift]
            if len(bits):
                yield NearPairs(np.minimum(one, other), np.maximum(one, other), bits)


def _members(hashes: Hashes, mask: np.uint64, task: Sorting) -> Places:
    """Return the places of a part's hashes."""
    if task.parts == 1:
        return np.arange(len(hashes))
    found = []
    for start in range(0, len(hashes), _COMPARED_AT_ONCE):
        mixed = (hashes[start : start + _COMPARED_AT_ONCE] & mask) * _MIX
        mixed >>= np.uint64(65 - task.parts.bit_length())
        found.append(start + np.flatnonzero(mixed == task.part))
    return np.concatenate(found)


class NearIndex:
    """Finds the stored hashes that are near others; for a few stored and very many others."""

    def __init__(self, hashes: Hashes, distance: int) -> None:
        self.distance = distance
        self._masks = block_masks(distance, len(hashes))
        self._orders = [np.argsort(hashes & mask, kind="stable") for mask in self._masks]
        self._values = [hashes[order] for order in self._orders]

    def near(self, hashes: Hashes) -> NearPairs:
        """Return all (place in `hashes`, stored place) within the distance, each once."""
        found = [NearPairs(*(np.empty(0, np.int64) for _ in NearPairs._fields))]
        for number, mask in enumerate(self._masks):
            order, value = self._orders[number], self._values[number]
            block = value & mask
            start = np.searchsorted(block, hashes & mask, side="left")
            end = np.searchsorted(block, hashes & mask, side="right")
            here = np.arange(len(hashes))
            for shift in range(len(value)):
                here = here[start[here] + shift < end[here]]
                if not len(here):
                    break
                there = start[here] + shift
                places, bits = _near(
                    hashes[here], value[there], self.distance, self._masks[:number]
                )
                found.append(NearPairs(here[places], order[there[places]], bits))
        return NearPairs(*(np.concatenate(parts) for parts in zip(*found)))


def block_masks(distance: int, count: int) -> list[np.uint64]:
    """Return the bits of each sorting's blocks; near hashes agree in at least one of them.

    Args:
        distance: bits in which near hashes differ at most, 0 to 32.
        count: hashes there are, for the choice of k.

    Raises:
        ValueError: a distance out of range.
    """
    if not 0 <= distance <= 32:
        raise ValueError(f"the distance is {distance}, 0 to 32 bits are possible")
    _, k = least_cost(distance, count)
    blocks = distance + k
    bounds = np.linspace(0, 64, blocks + 1).astype(int)
    parts = [(1 << int(end)) - (1 << int(start)) for start, end in pairwise(bounds)]
    return [np.uint64(sum(chosen)) for chosen in combinations(parts, k)]


def least_cost(distance: int, count: int) -> tuple[float, int]:
    """Return the comparisons that a hash costs among `count`, and the k with which it does."""
    return min((_cost(distance, k, count), k) for k in range(1, 64 - distance + 1))


def _cost(distance: int, k: int, count: int) -> float:
    tables = comb(distance + k, k)
    if tables > _MOST_TABLES and k > 1:
        return float("inf")
    agreeing = count / 2 ** (64 * k / (distance + k))
    # A sorting costs some comparisons for each hash; measured, it is about as many as this.
    return tables * (10.0 + agreeing / 2)


def _near(
    first: Hashes, second: Hashes, distance: int, earlier: list[np.uint64]
) -> tuple[Places, NDArray[np.int64]]:
    """Find the pairs that are near, but for those that an earlier sorting has found."""
    bits = differing_bits(first, second)
    places = np.flatnonzero(bits <= distance)
    different = first[places] ^ second[places]
    for mask in earlier:
        new = (different & mask) != 0
        places, different = places[new], different[new]
    return places, bits[places]
