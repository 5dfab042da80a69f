"""Exact and perceptual hashes of images, and the search for near-duplicates.

Manku, Jain, Das Sarma, "Detecting near-duplicates for web crawling", 2007.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations, pairwise
from math import comb
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from typer import Option

from data_tools.executor import Executor, raise_if_stopped
from data_tools.options import WorkerOptions
from data_tools.shards import Shard, ShardReader, hash_name, scan
from vlp.config import ConfigError
from vlp.data.image.decode import decode_image, open_image
from vlp.data.shards.sample_files import BadSample
from vlp.io import atomic_write

Hashes = NDArray[np.uint64]
Indices = NDArray[np.int64]

# Near-duplicates differ in at most 6 of 64 bits (coarse hash) and 48 of 256 bits (fine hash).
# On Flickr8k and COCO this finds all copies that are saved again, reduced to a third or squeezed,
# 99 % of copies brightened by a fifth or cropped by 1 % at each edge, and 68 % cropped by 2.5 %. Of
# 26 million pairs of different images, the 167 within 12 bits differ in at least 80 of 256. Rotated
# and flipped copies are not found.
DISTANCE, FINE_DISTANCE = 6, 48
FLAT = 3.0  # std of the coarse luminance (of 255) below which noise would set the bits
HASH_VERSION = 1  # raised whenever equal images get other hashes
READABLE, FLAT_IMAGE, UNREADABLE = 0, 1, 2
# Hashes of an image, 70 bytes.
RECORD = np.dtype(
    [
        ("key", "<u8"),  # hash_name(key)
        ("name", "<u8"),  # hash_name(source and image_id), 0 without
        ("bytes", "<u8"),  # first 64 bits of the sha256 of the stored bytes
        ("coarse", "<u8"),
        ("fine", "<u8", (4,)),
        ("sample", "<u4"),  # index of the sample in the shard
        ("second", "?"),  # True for the sample's second image, KEY.1.jpg
        ("state", "u1"),  # READABLE, FLAT_IMAGE (no perceptual hash) or UNREADABLE (no hash)
    ]
)
_BIT_COUNTS = np.array([number.bit_count() for number in range(1 << 16)], np.uint8)
_SIDE = 32  # of the luminance, in pixels
_LOW = 16  # coefficients of the DCT per axis


@dataclass(frozen=True, kw_only=True)
class NearOptions(WorkerOptions):
    """Options of `dedup` and `overlap`: the list to write, and which images count as the same."""

    out: Annotated[Path, Option(metavar="LIST", help="list of keys to write")]
    exact: Annotated[bool, Option("--exact", help="the same bytes only")] = False

    @property
    def max_distance(self) -> int | None:
        """Return the maximum of 64 bits in which near-duplicates differ; None with --exact."""
        return None if self.exact else DISTANCE

    def load(self, shards: Sequence[Shard], title: str) -> HashedImages:
        """Return the hashes of all images; the folder LIST.hashes stores them for the next run."""
        folder = self.out.with_name(self.out.name + ".hashes")
        work = partial(_store_hashes, folder=folder)
        parts, damaged = [], []
        for shard, (path, problem) in scan(work, shards, self.workers(), title):
            parts.append(np.load(path))
            damaged += [] if problem is None else [f"{shard}: {problem}"]
        if damaged:
            print(
                f"  careful: {len(damaged)} shards are damaged; images after the damage are not "
                f"compared (first: {damaged[0]})"
            )
        shard_index = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        return HashedImages(shards, np.concatenate(parts), shard_index)


class HashedImages(NamedTuple):
    """All images of shards in order."""

    shards: Sequence[Shard]
    records: NDArray[np.void]  # RECORDs, (images,)
    shard: Indices  # index of each image's shard in `shards`

    def keys(self, images: Indices, executor: Executor) -> Iterator[str]:
        """Yield the sample keys of images, by ascending index, from the headers of the shards."""
        shards, starts = np.unique(self.shard[images], return_index=True)
        samples = np.split(self.records["sample"][images], starts[1:])
        jobs = ((self.shards[shard], numbers) for shard, numbers in zip(shards, samples))
        for keys in executor.map(_read_keys, jobs):
            yield from keys


def hash_image(data: bytes, where: str = "the image") -> tuple[int, Hashes] | None:
    """Return an image's coarse hash (64 bits) and fine hash (4 words of 64 bits); None if flat.

    A bit is 1 if a DCT coefficient of the 32 x 32 luminance is above the median of the lowest 8 x 8
    or 16 x 16 coefficients, as in `imagehash.phash`. Raises BadSample.
    """
    try:
        with open_image(data, where) as image:
            gray = _decode_reduced(image) if image.format in ("JPEG", "MPO") else None
    except Exception:
        gray = None  # `decode_image` raises BadSample if the image is damaged
    if gray is None:
        gray = decode_image(data, where).convert("L")
    small = gray.resize((_SIDE, _SIDE), Image.Resampling.BOX)
    cosines = _cosines()
    coefficients = cosines @ np.asarray(small, dtype=np.float64) @ cosines.T
    # The DCT is orthonormal and coefficient (0, 0) the mean: this is the low frequencies' variance.
    variance = ((coefficients * coefficients).sum() - coefficients[0, 0] ** 2) / _SIDE**2
    if variance < FLAT**2:
        return None
    return int(_median_bits(coefficients[:8, :8])[0]), _median_bits(coefficients)


def image_record(
    data: bytes, where: str, key: int = 0, name: int = 0, sample: int = 0, second: bool = False
) -> tuple[object, ...]:
    """Return the fields of a RECORD for an encoded image; perceptual hashes are 0 if unreadable."""
    state, hashes = READABLE, None
    try:
        hashes = hash_image(data, where)
        state = FLAT_IMAGE if hashes is None else READABLE
    except BadSample:
        state = UNREADABLE
    coarse, fine = hashes or (0, np.zeros(4, np.uint64))
    exact = int.from_bytes(hashlib.sha256(data).digest()[:8], "little")
    return key, name, exact, coarse, fine, sample, second, state


def fine_distance(first: Hashes, second: Hashes) -> NDArray[np.int64]:
    """Count the differing bits of 256-bit hashes: (..., 4) words to (...)."""
    return differing_bits(first, second).sum(-1)


def differing_bits(first: Hashes, second: Hashes) -> NDArray[np.int64]:
    """Count the differing bits of 64-bit words, elementwise."""
    different = np.bitwise_xor(first, second)
    return _BIT_COUNTS[different[..., None].view(np.uint16)].sum(-1, dtype=np.int64)


def _store_hashes(shard: Shard, folder: Path) -> tuple[Path, str | None]:
    """Write the RECORDs of a shard unless stored before; returns their file and the damage."""
    status = shard.path.stat()
    identity = f"{shard.path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{HASH_VERSION}"
    path = folder / f"{shard.path.stem}-{hash_name(identity):016x}.npy"
    if path.is_file():
        return path, None
    with ShardReader(shard.path) as reader:
        numbers = range(len(reader.samples))
        records = [record for number in numbers for record in _records(reader, number)]
    # Under another name, so that the next run reports the damage again.
    path = path if reader.problem is None else path.with_suffix(".damaged.npy")
    # Two commands may write this file at once, so each has its own temporary name.
    with atomic_write(path, suffix=f".{os.getpid()}.tmp", error=ConfigError) as file:
        np.save(file, np.array(records, dtype=RECORD))
    return path, reader.problem


def _read_keys(job: tuple[Shard, Iterable[int]]) -> list[str]:
    shard, numbers = job
    with ShardReader(shard.path) as reader:
        return [reader.samples[number].key for number in numbers]


def _records(shard: ShardReader, number: int) -> list[tuple[object, ...]]:
    """Return the RECORDs of a sample's images, empty for a bad sample."""
    try:
        sample = shard.read(shard.samples[number])
    except BadSample:
        return []
    source, image_id = sample.annotation.source, sample.annotation.image_id
    # An id identifies an image only within its source.
    name = hash_name(f"{source}\0{image_id}") if source and image_id else 0
    key = hash_name(sample.key)
    images = enumerate((sample.image, sample.second_image))
    return [
        image_record(data, sample.where, key, name, number, bool(second))
        for second, data in images
        if data is not None
    ]


def _decode_reduced(image: Image.Image) -> Image.Image:
    """Return the luminance of a JPEG, decoded at 1/8 to 1/2 of its size if large enough."""
    image.draft("L", (4 * _SIDE, 4 * _SIDE))
    image.load()
    # Damaged EXIF data does not make an image bad.
    with suppress(Exception):
        image = ImageOps.exif_transpose(image)
    return image.convert("L")


def _median_bits(block: NDArray[np.float64]) -> Hashes:
    """Return which values of a block are above its median, packed into words of 64 bits."""
    return np.packbits(block > np.median(block)).view("<u8")


@cache
def _cosines() -> NDArray[np.float64]:
    """Return the lowest rows of the orthonormal DCT-II, (coefficients, pixels)."""
    # Another algorithm rounds zero coefficients of symmetric images, and so hashes, differently.
    frequency, pixel = np.arange(_LOW)[:, None], np.arange(_SIDE)[None]
    cosines = np.cos(np.pi * frequency * (2 * pixel + 1) / (2 * _SIDE)) * np.sqrt(2 / _SIDE)
    cosines[0] /= np.sqrt(2)
    return cosines


_CHUNK = 1 << 18  # queries compared at once
_MAX_CHOICES = 2000  # number of choices of k bands
_SORTING_COST = 6.0  # per hash, in units of a comparison; measured
# Bits by diagonals of the 8 x 8 coefficients: bits of one row or column are correlated, so a band
# of them would separate fewer hashes.
_BITS_BY_DIAGONAL = sorted(range(64), key=lambda bit: ((bit // 8 - bit) % 8, bit))


class Drops(NamedTuple):
    """Duplicate images to drop, by index: `originals[i]` stays instead of `dropped[i]`."""

    dropped: Indices
    originals: Indices


def near_pairs(
    stored: Hashes, distance: int, query_hashes: Hashes | None = None
) -> Iterator[tuple[Indices, Indices]]:
    """Yield all pairs of 64-bit hashes within `distance` (0 to 32) bits, in arrays, each pair once.

    A pair has the indices of a query and of a stored hash; without queries, of two stored hashes,
    the earlier one first.
    """
    # Hashes within `distance` bits are equal in at least k of `distance + k` bands of bits. For
    # each choice of k bands, hashes are sorted by them, and compared if they are equal in them.
    masks = band_masks(distance, best_k(distance, len(stored)))
    for number, mask in enumerate(masks):
        order = np.argsort(stored & mask, kind="stable")
        hashes = stored[order]
        queries = hashes if query_hashes is None else query_hashes
        query_indices = order if query_hashes is None else np.arange(len(queries))
        lower = np.searchsorted(hashes & mask, queries & mask, side="left")
        upper = np.searchsorted(hashes & mask, queries & mask, side="right")
        if query_hashes is None:
            # Compare each hash with later hashes only, so that a pair comes once.
            lower = np.arange(1, len(hashes) + 1)
        for start in range(0, len(queries), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            rows = start + np.flatnonzero(lower[chunk] < upper[chunk])
            columns = lower[rows]
            # Compare every query of the chunk with its next candidate, until none has another.
            while len(rows):
                raise_if_stopped()
                different = queries[rows] ^ hashes[columns]
                is_near = differing_bits(queries[rows], hashes[columns]) <= distance
                # Pairs that are equal in an earlier choice of bands were yielded there.
                for earlier in masks[:number]:
                    is_near &= (different & earlier) != 0
                if is_near.any():
                    left, right = query_indices[rows[is_near]], order[columns[is_near]]
                    if query_hashes is None:
                        left, right = np.minimum(left, right), np.maximum(left, right)
                    yield left, right
                columns = columns + 1
                rows, columns = rows[columns < upper[rows]], columns[columns < upper[rows]]


def band_masks(distance: int, k: int) -> list[np.uint64]:
    """Return for each choice of k of `distance + k` bands a mask of their bits."""
    bounds = np.linspace(0, 64, distance + k + 1).astype(int)
    bands = [
        sum(1 << bit for bit in _BITS_BY_DIAGONAL[start:end]) for start, end in pairwise(bounds)
    ]
    return [np.uint64(sum(choice)) for choice in combinations(bands, k)]


def best_k(distance: int, count: int) -> int:
    """Return the k of `near_pairs` with the cheapest search among `count` random hashes."""

    def cost(k: int) -> float:
        candidates = count * 2.0 ** (-64 * k / (distance + k))
        return comb(distance + k, k) * (_SORTING_COST + candidates / 2)

    choices = range(1, 65 - distance)
    return min((k for k in choices if k == 1 or comb(distance + k, k) <= _MAX_CHOICES), key=cost)


def duplicate_images(records: NDArray[np.void], distance: int | None) -> Drops:
    """Find the images to drop among RECORDs in order of preference, so that no duplicates stay.

    Duplicates have equal bytes or, unless `distance` is None, are near-duplicates within `distance`
    of 64 bits. Unreadable images and samples of two images stay.
    """
    in_pair = records["second"].copy()
    in_pair[:-1] |= records["second"][1:]
    indices = np.flatnonzero(~in_pair & (records["state"] != UNREADABLE))
    # Links (2, links): row 0 has images to drop, row 1 the images that stay instead.
    same_bytes = _link_equal(records["bytes"][indices], indices)
    links = [same_bytes]
    if distance is not None:
        indices = np.setdiff1d(indices, same_bytes[0])
        indices = indices[records["state"][indices] == READABLE]
        same_coarse = _link_equal_coarse(records, indices)
        indices = np.setdiff1d(indices, same_coarse[0])
        near = [np.empty((2, 0), np.int64), *_near_links(records, indices, distance)]
        links += [same_coarse, _greedy_links(np.concatenate(near, axis=1))]
    return _follow_links(np.concatenate(links, axis=1))


def near_duplicate_groups(records: NDArray[np.void]) -> Indices:
    """Return the group of each image, (images,): near-duplicates, directly or through others."""
    usable = np.flatnonzero(records["state"] != UNREADABLE)
    links = [_link_equal(records["bytes"][usable], usable)]
    readable = usable[records["state"][usable] == READABLE]
    words = np.column_stack((records["coarse"][readable], records["fine"][readable]))
    hashes = np.ascontiguousarray(words).view(f"V{words.itemsize * words.shape[1]}").reshape(-1)
    # Link equal hashes first: thousands of copies of an image would make millions of pairs.
    links.append(_link_equal(hashes, readable))
    links += _near_links(records, np.setdiff1d(readable, links[1][0]), DISTANCE)
    first, second = np.concatenate(links, axis=1)
    shape = len(records), len(records)
    graph = coo_array((np.ones(len(first), np.int8), (first, second)), shape)
    groups: Indices = connected_components(graph, directed=False)[1].astype(np.int64)
    return groups


def _near_links(records: NDArray[np.void], indices: Indices, distance: int) -> Iterator[Indices]:
    """Yield pairs of near-duplicate images, (2, pairs), the earlier one first."""
    fine = records["fine"]
    for left, right in near_pairs(records["coarse"][indices], distance):
        first, second = indices[left], indices[right]
        is_near = fine_distance(fine[first], fine[second]) <= FINE_DISTANCE
        yield np.stack((first[is_near], second[is_near]))


def _link_equal(values: NDArray[np.generic], indices: Indices) -> Indices:
    """Return links from images to the first image of an equal value, (2, links)."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    links = np.stack((indices, indices[first[inverse.reshape(-1)]]))
    return links[:, links[0] != links[1]]


def _link_equal_coarse(records: NDArray[np.void], indices: Indices) -> Indices:
    """Return links from near-duplicates of equal coarse hash to the earliest image, (2, links)."""
    order = indices[np.argsort(records["coarse"][indices], kind="stable")]
    _, starts = np.unique(records["coarse"][order], return_index=True)
    links = [np.empty((2, 0), np.int64)]
    # Compare with one image at a time: thousands of copies would make millions of pairs.
    for start, end in pairwise([*starts, len(order)]):
        group = order[start:end]
        while len(group) > 1:
            raise_if_stopped()
            fine = records["fine"][group]
            is_near = fine_distance(fine[:1], fine) <= FINE_DISTANCE
            links.append(np.stack((group[is_near], np.full(is_near.sum(), group[0])))[:, 1:])
            group = group[~is_near]
    return np.concatenate(links, axis=1)


def _greedy_links(pairs: Indices) -> Indices:
    """Return links from images to drop to images that stay, (2, links), from pairs (2, pairs)."""
    # In the order of the images: an image that is only like dropped images stays.
    first, second = pairs[:, np.lexsort((pairs[0], pairs[1]))].tolist()
    links: dict[int, int] = {}
    for image, duplicate in zip(first, second):
        if image not in links:
            links.setdefault(duplicate, image)
    return np.array([[*links], [*links.values()]], np.int64)


def _follow_links(links: Indices) -> Drops:
    """Replace the targets of links, at most one link per image, by images that stay."""
    dropped, originals = links[:, np.argsort(links[0])]
    while len(dropped):
        positions = np.minimum(np.searchsorted(dropped, originals), len(dropped) - 1)
        is_dropped = dropped[positions] == originals
        if not is_dropped.any():
            break
        originals = np.where(is_dropped, originals[positions], originals)
    return Drops(dropped, originals)
