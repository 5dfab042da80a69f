"""Pairs of 64-bit hashes that differ in few bits, every one of them, without comparing all pairs.

Cut 64 bits into `distance + k` blocks: hashes that differ in at most `distance` bits agree in at
least k whole blocks. So for each choice of k blocks, sort by those blocks and compare within equal
ones only. More blocks (k) mean more sortings and fewer comparisons. Which is best depends on how
many hashes there are, and on how often two agree: bits of images are not independent of each
other, so that is counted in a sample. Any k finds the same pairs. Manku, Jain, Das Sarma,
"Detecting near-duplicates for web crawling", 2007.
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
_COMPARED_AT_ONCE = 1 << 18
_LOOKED_AT_AT_ONCE = 1 << 16
# Bits by diagonals of the 8 x 8 cosines: neighbours in a row or a column depend on each other, and
# a block of those tells less.
_SCATTERED = sorted(range(64), key=lambda bit: ((bit // 8 - bit) % 8, bit))
_ALL = np.uint64(2**64 - 1)
_MIX = np.uint64(0x9E3779B97F4A7C15)

# Of all hashes, one of so many is looked at for the choice of k, and up to so many, in some of the
# sortings: a hundredth of a search, or less.
_SAMPLED, _MOST_SAMPLED, _SORTINGS_SAMPLED = 64, 1 << 18, 8

# What a sorting, and a look at a hash for each of its parts, costs in comparisons; measured.
_SORTING_COST, _PART_COST = 6.0, 0.1


class NearPairs(NamedTuple):
    """Places of hashes that are near each other, and in how many bits they differ."""

    first: Places
    second: Places
    distance: NDArray[np.int64]


class HashPart(NamedTuple):
    """Part of hashes: which, of how many, a power of 2. Equal ones are in the same part."""

    number: int
    parts: int


class Sorting(NamedTuple):
    """A task of a search: which of the sortings by k blocks, and of which part of the hashes.

    A hash's part depends on the bits that are sorted by, so none agrees with one of another part.
    """

    k: int
    number: int
    part: HashPart


def parts_of(count: int) -> list[HashPart]:
    """Cut `count` hashes into parts of at most some 16 million."""
    parts = _parts(count)
    return [HashPart(number, parts) for number in range(parts)]


def places_of_part(
    hashes: Hashes, part: HashPart, among: NDArray[np.bool_] | None = None, mask: np.uint64 = _ALL
) -> Places:
    """Return the places of a part's hashes, ascending.

    Args:
        hashes: all of them, perhaps mapped from a file.
        part: by the bits of `mask`.
        among: (hashes,) which of them count; None is all.
        mask: bits that count.
    """
    found = [np.empty(0, np.int64)]
    shift = np.uint64(65 - part.parts.bit_length())
    for start in range(0, len(hashes), _LOOKED_AT_AT_ONCE):
        some = slice(start, start + _LOOKED_AT_AT_ONCE)
        if part.parts == 1:
            count = len(hashes[some])
            places = np.arange(count) if among is None else np.flatnonzero(among[some])
        else:
            mixed = (hashes[some] & mask) * _MIX
            mixed >>= shift
            places = np.flatnonzero(mixed == part.number)
            places = places if among is None else places[among[some][places]]
        found.append(start + places)
    return np.concatenate(found)


def sortings(distance: int, count: int, k: int) -> list[Sorting]:
    """Return the tasks of a search among `count` hashes, each of at most some 16 million."""
    numbers = range(comb(distance + k, k))
    return [Sorting(k, number, part) for number in numbers for part in parts_of(count)]


def _parts(count: int) -> int:
    return 1 << max(0, (count - 1) // _MOST_AT_ONCE).bit_length()


def near_pairs(hashes: Hashes, distance: int) -> Iterator[NearPairs]:
    """Yield every pair of places (first < second) of hashes within `distance` bits, once.

    Memory beside the hashes is that of one task; equal hashes, though, are all paired with each
    other, so many of them should be made one before.
    """
    for task in sortings(distance, len(hashes), best_k(hashes, distance)):
        yield from pairs_of_sorting(hashes, distance, task)


def pairs_of_sorting(
    hashes: Hashes, distance: int, task: Sorting, among: NDArray[np.bool_] | None = None
) -> Iterator[NearPairs]:
    """Yield the pairs of `near_pairs` that one task finds and none of an earlier sorting.

    `among`, (hashes,), says which hashes are searched; None is all.
    """
    masks = block_masks(distance, task.k)
    mask = masks[task.number]
    order, same = _sorted(hashes, places_of_part(hashes, task.part, among, mask), mask)
    value = hashes[order]
    # Members of a block lie side by side: compare each with the next, the one after that, ...
    for start in range(0, len(order), _COMPARED_AT_ONCE):
        here = start + np.flatnonzero(same[start : start + _COMPARED_AT_ONCE])
        shift = 1
        while len(here):
            places, bits = _near(
                value[here], value[here + shift], distance, masks[: task.number + 1]
            )
            one, other = order[here[places]], order[here[places] + shift]
            if len(bits):
                yield NearPairs(np.minimum(one, other), np.maximum(one, other), bits)
            here = here[same[here + shift]]
            shift += 1


def _sorted(hashes: Hashes, members: Places, mask: np.uint64) -> tuple[Places, NDArray[np.bool_]]:
    """Sort members by the bits of a mask: their places, and whether the next one's are equal.

    Of millions, two whose bits differ may count as equal, once in thousands of searches.
    """
    # Sorting numbers takes half of the time of sorting places by them.
    room = np.uint64(len(members).bit_length())
    block = (hashes[members] & mask) * _MIX
    block >>= room
    block <<= room
    block |= np.arange(len(members), dtype=np.uint64)
    block.sort()
    order = (block & ((np.uint64(1) << room) - np.uint64(1))).astype(np.int64)
    block >>= room
    same = np.zeros(len(members), np.bool_)
    np.equal(block[1:], block[:-1], out=same[:-1])
    return members[order], same


class NearIndex:
    """Finds the stored hashes that are near others; for a few stored and very many others."""

    def __init__(self, hashes: Hashes, distance: int) -> None:
        self.distance = distance
        self._masks = block_masks(distance, best_k(hashes, distance))
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
                    hashes[here], value[there], self.distance, self._masks[: number + 1]
                )
                found.append(NearPairs(here[places], order[there[places]], bits))
        return NearPairs(*(np.concatenate(parts) for parts in zip(*found)))


def block_masks(distance: int, k: int) -> list[np.uint64]:
    """Return the bits of each sorting by k blocks; near hashes agree in at least one of them.

    Args:
        distance: bits in which near hashes differ at most, 0 to 32.
        k: blocks that a sorting takes.

    Raises:
        ValueError: a distance out of range.
    """
    if not 0 <= distance <= 32:
        raise ValueError(f"the distance is {distance}, 0 to 32 bits are possible")
    bounds = np.linspace(0, 64, distance + k + 1).astype(int)
    parts = [sum(1 << bit for bit in _SCATTERED[start:end]) for start, end in pairwise(bounds)]
    return [np.uint64(sum(chosen)) for chosen in combinations(parts, k)]


def best_k(hashes: Hashes, distance: int, count: int | None = None) -> int:
    """Choose the k with which a search costs least, by how often sampled hashes agree.

    Args:
        hashes: that are searched, or some of them.
        distance: as of the search.
        count: of all hashes, where `hashes` are some of them.
    """
    count = len(hashes) if count is None else count
    size = min(max(2, count // _SAMPLED), _MOST_SAMPLED)
    sample = np.array(hashes[:: max(1, len(hashes) // size)][:size])
    best, least = 1, float("inf")
    for k in _choices(distance):
        cost = _cost(distance, k, count, 0.0)
        if cost < least:
            cost = _cost(distance, k, count, _agreeing(sample, distance, k))
        if cost < least:
            best, least = k, cost
    return best


def _agreeing(hashes: Hashes, distance: int, k: int) -> float:
    """Return the share of pairs that agree in the blocks of a sorting, a mean of some."""
    masks = block_masks(distance, k)
    some = masks[:: -(-len(masks) // _SORTINGS_SAMPLED)]
    pairs = 0.0
    for mask in some:
        _, sizes = np.unique(hashes & mask, return_counts=True)
        pairs += (sizes * (sizes - 1.0)).sum()
    return float(pairs / len(some) / max(1, len(hashes) * (len(hashes) - 1)))


def least_cost(distance: int, count: int) -> tuple[float, int]:
    """Return the comparisons that a hash costs among `count` random ones, and the k for that."""
    return min((_cost(distance, k, count, 0.0), k) for k in _choices(distance))


def _choices(distance: int) -> list[int]:
    return [k for k in range(1, 65 - distance) if k == 1 or comb(distance + k, k) <= _MOST_TABLES]


def _cost(distance: int, k: int, count: int, share: float) -> float:
    """Return the comparisons of a hash if a share of pairs agree, at least that of random bits."""
    agreeing = count * max(share, 2.0 ** (-64 * k / (distance + k)))
    return comb(distance + k, k) * (_SORTING_COST + _PART_COST * _parts(count) + agreeing / 2)


def _near(
    first: Hashes, second: Hashes, distance: int, masks: list[np.uint64]
) -> tuple[Places, NDArray[np.int64]]:
    """Find the pairs that are near, agree in the last mask and in none of an earlier sorting."""
    bits = differing_bits(first, second)
    places = np.flatnonzero(bits <= distance)
    different = first[places] ^ second[places]
    new = (different & masks[-1]) == 0
    for mask in masks[:-1]:
        new &= (different & mask) != 0
    return places[new], bits[places[new]]
