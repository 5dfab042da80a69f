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

from data_tools.executor import Executor, go_on
from data_tools.options import WorkerOptions
from data_tools.shards import Shard, ShardReader, number_of, scan
from vlp.config import ConfigError
from vlp.data.image.decode import decode_image, open_image
from vlp.data.shards.sample_files import BadSample
from vlp.io import atomic_write

Hashes = NDArray[np.uint64]
Indices = NDArray[np.int64]

# Of 64 and 256 bits. On Flickr8k and COCO this finds all copies saved again, reduced to a third or
# squeezed, 99 % brightened by a fifth or cut by 1 % at each edge, and 68 % cut by 2.5 %. Of 26
# million pairs of different images, the 167 within 12 bits differ in at least 80 of 256. Turned and
# mirrored copies are not found.
DISTANCE, FINE_DISTANCE = 6, 48
FLAT = 3.0  # std of the coarse luminance (of 255) below which noise would set the bits
# Raised whenever equal images get other hashes.
HASH_VERSION = 1
READABLE, FLAT_IMAGE, UNREADABLE = 0, 1, 2
# 70 bytes an image.
RECORD = np.dtype(
    [
        ("key", "<u8"),  # number_of(key)
        ("name", "<u8"),  # number_of(source and image_id), 0 without
        ("bytes", "<u8"),  # first 64 bits of the sha256 of the stored bytes
        ("coarse", "<u8"),
        ("fine", "<u8", (4,)),
        ("sample", "<u4"),  # its number in the shard
        ("second", "?"),  # KEY.1.jpg
        ("state", "u1"),  # READABLE, FLAT_IMAGE (no perceptual hash) or UNREADABLE (no hash)
    ]
)
_ONES = np.array([number.bit_count() for number in range(1 << 16)], np.uint8)
_SIDE = 32
_LOW = 16


@dataclass(frozen=True, kw_only=True)
class NearOptions(WorkerOptions):
    """The list to write, and the criterion of equal images."""

    out: Annotated[Path, Option(metavar="LIST", help="list of the keys to take out")]
    exact: Annotated[bool, Option("--exact", help="the same bytes only")] = False

    @property
    def max_distance(self) -> int | None:
        """Return the maximum of 64 bits in which near-duplicates differ; None for exact ones."""
        return None if self.exact else DISTANCE

    def load(self, shards: Sequence[Shard], title: str) -> HashedImages:
        """Hash the images of shards without stored hashes."""
        folder = self.out.with_name(self.out.name + ".hashes")
        work = partial(_store_hashes, folder=folder)
        parts = [np.load(path) for _, path in scan(work, shards, self.workers(), title)]
        shard = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        return HashedImages(shards, np.concatenate(parts), shard)


class HashedImages(NamedTuple):
    """All images of shards: RECORDs in order, and the index of each one's shard in `shards`."""

    shards: Sequence[Shard]
    records: NDArray[np.void]
    shard: Indices

    def keys(self, images: Indices, executor: Executor) -> Iterator[str]:
        """Yield the keys of images (in ascending order) from the headers of their shards."""
        used, starts = np.unique(self.shard[images], return_index=True)
        samples = np.split(self.records["sample"][images], starts[1:])
        jobs = (SomeSamples(self.shards[shard], numbers) for shard, numbers in zip(used, samples))
        for keys in executor.map(_keys, jobs):
            yield from keys

    def count_shared_keys(self, dropped: NDArray[np.bool_]) -> int:
        """Count samples that are kept though the list has their key, for one of another folder."""
        remaining = self.records["key"][~dropped & ~self.records["second"]]
        return int(np.isin(remaining, self.records["key"][dropped]).sum())


class SomeSamples(NamedTuple):
    """Samples of a shard to look up keys for."""

    shard: Shard
    numbers: Iterable[int]

    def __str__(self) -> str:
        return str(self.shard)


def hash_image(data: bytes, where: str = "the image") -> tuple[int, Hashes] | None:
    """Return hashes of 64 and 256 bits (4 words); None for a flat image; raises BadSample."""
    # As `imagehash.phash`, which decodes at full size: signs of the lowest 8 x 8 and 16 x 16 DCT
    # coefficients of the 32 x 32 luminance against their median.
    try:
        with open_image(data, where) as image:
            gray = _reduced(image) if image.format in ("JPEG", "MPO") else None
    # Of another format, or damaged: `decode_image` decides which.
    except Exception:
        gray = None
    if gray is None:
        gray = decode_image(data, where).convert("L")
    small = gray.resize((_SIDE, _SIDE), Image.Resampling.BOX)
    luminance = np.asarray(small, dtype=np.float64)
    waves = _cosines()
    low = waves @ luminance @ waves.T
    # An orthonormal transform keeps the sum of squares.
    variance = ((low * low).sum() - low[0, 0] ** 2) / _SIDE**2
    if variance < FLAT**2:
        return None
    return int(_signs(low[:8, :8])[0]), _signs(low)


def image_record(
    data: bytes, where: str, key: int = 0, name: int = 0, sample: int = 0, second: bool = False
) -> tuple[object, ...]:
    """Return the fields of a RECORD for an encoded image, which may be unreadable."""
    state, coarse, fine = READABLE, 0, np.zeros(4, np.uint64)
    try:
        hashes = hash_image(data, where)
    except BadSample:
        state = UNREADABLE
    else:
        if hashes is None:
            state = FLAT_IMAGE
        else:
            coarse, fine = hashes
    exact = int.from_bytes(hashlib.sha256(data).digest()[:8], "little")
    return key, name, exact, coarse, fine, sample, second, state


def fine_distance(first: Hashes, second: Hashes) -> NDArray[np.int64]:
    """Count differing bits of 256-bit hashes, (..., 4)."""
    return differing_bits(first, second).sum(-1)


def differing_bits(first: Hashes, second: Hashes) -> NDArray[np.int64]:
    """Count differing bits of 64-bit words."""
    different = np.bitwise_xor(first, second)
    return _ONES[different[..., None].view(np.uint16)].sum(-1, dtype=np.int64)


def _store_hashes(shard: Shard, folder: Path) -> Path:
    status = shard.path.stat()
    identity = f"{shard.path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{HASH_VERSION}"
    path = folder / f"{shard.path.stem}-{number_of(identity):016x}.npy"
    if not path.is_file():
        with ShardReader(shard.path) as opened:
            rows = [row for number in range(len(opened)) for row in _rows(opened, number)]
        # Several commands may keep hashes of the same shards in this folder.
        with atomic_write(path, suffix=f".{os.getpid()}.tmp", error=ConfigError) as file:
            np.save(file, np.array(rows, dtype=RECORD))
    return path


def _keys(job: SomeSamples) -> list[str]:
    with ShardReader(job.shard.path) as opened:
        return [opened.samples[number].key for number in job.numbers]


def _rows(shard: ShardReader, number: int) -> list[tuple[object, ...]]:
    try:
        sample = shard.read(shard.samples[number])
    except BadSample:
        return []
    source, image_id = sample.annotation.source, sample.annotation.image_id
    # The same id means another image in another source, and nothing without one.
    name = number_of(f"{source}\0{image_id}") if source and image_id else 0
    key = number_of(sample.key)
    images = enumerate((sample.image, sample.second_image))
    return [
        image_record(data, sample.where, key, name, number, bool(second))
        for second, data in images
        if data is not None
    ]


def _reduced(image: Image.Image) -> Image.Image:
    """Return the luminance of a JPEG, decoded at 1/8 to 1/2 of its size if large enough."""
    image.draft("L", (4 * _SIDE, 4 * _SIDE))
    image.load()
    # Garbage outside the pixels does not make an image bad.
    with suppress(Exception):
        image = ImageOps.exif_transpose(image)
    return image.convert("L")


def _signs(block: NDArray[np.float64]) -> Hashes:
    # The median is the mean of the two middle values; bits are packed into words of 64.
    values = block.reshape(-1)
    middle = values.size // 2
    between = np.partition(values, (middle - 1, middle))[middle - 1 : middle + 1].sum() / 2
    return np.packbits(values > between).view("<u8")


@cache
def _cosines() -> NDArray[np.float64]:
    """Return the lowest rows of the orthonormal DCT-II, (coefficients, pixels)."""
    frequency, pixel = np.arange(_LOW)[:, None], np.arange(_SIDE)[None]
    waves = np.cos(np.pi * frequency * (2 * pixel + 1) / (2 * _SIDE)) * np.sqrt(2 / _SIDE)
    waves[0] /= np.sqrt(2)
    return waves


_COMPARED_AT_ONCE = 1 << 18
_MOST_BANDS = 2000
# Comparisons per sorted hash, measured.
_SORTING_COST = 6.0
# Bits by diagonals of the 8 x 8 cosines: neighbours in a row or a column depend on each other, and
# a band of those tells less.
_SCATTERED = sorted(range(64), key=lambda bit: ((bit // 8 - bit) % 8, bit))


class Drops(NamedTuple):
    """Images to drop: `originals[i]` stays in place of `dropped[i]`."""

    dropped: Indices
    originals: Indices


def near_pairs(
    stored: Hashes, distance: int, query_hashes: Hashes | None = None
) -> Iterator[tuple[Indices, Indices]]:
    """Yield all pairs (query, stored) of 64-bit hashes within `distance` (0 to 32) bits, each once.

    Without queries a pair is (earlier, later).
    """
    # Hashes within `distance` bits agree in at least k of `distance + k` bands, so each choice of k
    # bands is sorted by and compared within equal ones.
    masks = band_masks(distance, best_k(distance, len(stored)))
    for number, mask in enumerate(masks):
        order = np.argsort(stored & mask, kind="stable")
        value = stored[order]
        queries = value if query_hashes is None else query_hashes
        query_indices = order if query_hashes is None else np.arange(len(queries))
        lower = np.searchsorted(value & mask, queries & mask, side="left")
        upper = np.searchsorted(value & mask, queries & mask, side="right")
        if query_hashes is None:
            # Each hash with those behind it, so that a pair comes once.
            lower = np.arange(1, len(value) + 1)
        for start in range(0, len(queries), _COMPARED_AT_ONCE):
            chunk = slice(start, start + _COMPARED_AT_ONCE)
            rows = start + np.flatnonzero(lower[chunk] < upper[chunk])
            columns = lower[rows]
            while len(rows):
                go_on()
                different = queries[rows] ^ value[columns]
                is_near = differing_bits(queries[rows], value[columns]) <= distance
                # An earlier choice of bands has found those that agree in it.
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
    """Return the bits of each choice of k bands; near hashes agree in at least one of them."""
    bounds = np.linspace(0, 64, distance + k + 1).astype(int)
    parts = [sum(1 << bit for bit in _SCATTERED[start:end]) for start, end in pairwise(bounds)]
    return [np.uint64(sum(chosen)) for chosen in combinations(parts, k)]


def best_k(distance: int, count: int) -> int:
    """Return the k of the cheapest search indices `count` random hashes."""

    def cost(k: int) -> float:
        agreeing = count * 2.0 ** (-64 * k / (distance + k))
        return comb(distance + k, k) * (_SORTING_COST + agreeing / 2)

    choices = range(1, 65 - distance)
    return min((k for k in choices if k == 1 or comb(distance + k, k) <= _MOST_BANDS), key=cost)


def usable_images(records: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return a mask of the readable images that are alone in their sample."""
    paired = records["second"].copy()
    paired[:-1] |= records["second"][1:]
    usable: NDArray[np.bool_] = ~paired & (records["state"] != UNREADABLE)
    return usable


def duplicate_images(records: NDArray[np.void], distance: int | None) -> Drops:
    """Find the images that repeat an earlier, kept one indices RECORDs in order of preference.

    Bytes are equal, or hashes within `distance` bits of 64.
    """
    indices = np.flatnonzero(usable_images(records))
    links = [_link_equal(records["bytes"][indices], indices)]
    if distance is not None:
        indices = np.setdiff1d(indices, links[0][0])
        indices = indices[records["state"][indices] == READABLE]
        links.append(_same_coarse(records, indices))
        indices = np.setdiff1d(indices, links[1][0])
        near = [np.empty((2, 0), np.int64), *_near_links(records, indices, distance)]
        links.append(_greedy_links(np.concatenate(near, axis=1)))
    return _resolved(np.concatenate(links, axis=1))


def near_duplicate_groups(records: NDArray[np.void], distance: int = DISTANCE) -> Indices:
    """Return each image's group, a chain of near-duplicates; each unreadable image is its own."""
    usable = np.flatnonzero(records["state"] != UNREADABLE)
    links = [_link_equal(records["bytes"][usable], usable)]
    textured = usable[records["state"][usable] == READABLE]
    hashes = np.column_stack((records["coarse"][textured], records["fine"][textured]))
    hashes = np.ascontiguousarray(hashes).view(f"V{hashes.itemsize * hashes.shape[1]}").reshape(-1)
    # Equal hashes count once: thousands of copies of an image would make millions of pairs.
    links.append(_link_equal(hashes, textured))
    links += _near_links(records, np.setdiff1d(textured, links[1][0]), distance)
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
    """Link the others of equal values to their first one: (2, links)."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    links = np.stack((indices, indices[first[inverse.reshape(-1)]]))
    return links[:, links[0] != links[1]]


def _same_coarse(records: NDArray[np.void], indices: Indices) -> Indices:
    """Link images of equal 64 bits and near 256 bits to the first, (2, links)."""
    order = indices[np.argsort(records["coarse"][indices], kind="stable")]
    _, starts = np.unique(records["coarse"][order], return_index=True)
    links = [np.empty((2, 0), np.int64)]
    # One by one, as thousands of copies of an image would make millions of pairs.
    for start, end in pairwise([*starts, len(order)]):
        group = order[start:end]
        while len(group) > 1:
            go_on()
            fine = records["fine"][group]
            near = fine_distance(fine[:1], fine) <= FINE_DISTANCE
            links.append(np.stack((group[near], np.full(near.sum(), group[0])))[:, 1:])
            group = group[~near]
    return np.concatenate(links, axis=1)


def _greedy_links(pairs: Indices) -> Indices:
    """Return the links (2, links) from dropped to kept images of near-duplicate pairs."""
    # Earlier images are decided upon before later ones look at them: an image like a dropped one
    # alone stays.
    first, second = pairs[:, np.lexsort((pairs[0], pairs[1]))].tolist()
    links: dict[int, int] = {}
    for image, duplicate in zip(first, second):
        if image not in links:
            links.setdefault(duplicate, image)
    return np.array([[*links], [*links.values()]], np.int64)


def _resolved(links: Indices) -> Drops:
    """Follow links, each of another image, to images that are kept."""
    dropped, originals = links[:, np.argsort(links[0])]
    while len(dropped):
        positions = np.minimum(np.searchsorted(dropped, originals), len(dropped) - 1)
        is_dropped = dropped[positions] == originals
        if not is_dropped.any():
            break
        originals = np.where(is_dropped, originals[positions], originals)
    return Drops(dropped, originals)
