"""Hashes of an image: of its bytes, and of its looks.

How it looks is a perceptual hash of 64 bits for searching and one of 256 for making sure. Both are
signs of a discrete cosine transform of the image's luminance at 32 x 32: the lowest 8 x 8 and
16 x 16 coefficients, each above its median or not (the arrangement of `imagehash.phash`, which is
not used because it would bring PyWavelets along and decodes every JPEG at full size).

Two images look alike if they differ in at most 6 of the 64 bits and in at most 48 of the 256. On
Flickr8k and COCO this finds all copies that were saved again (JPEG, WebP, PNG), reduced to a third
or squeezed, 99 % of those brightened by a fifth or cut by 1 % at each edge, and 68 % of those cut
by 2.5 %. Of 26 million pairs of different images, the 167 that differ in at most 12 bits differ in
at least 80 of the 256. Turned and mirrored copies are not found, and a change of colour that leaves
the luminance alone is not seen.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from typer import Option

from data_tools.executor import Executor
from data_tools.options import WorkerOptions
from data_tools.shards import Shard, ShardReader, number_of, scan
from vlp.config import ConfigError
from vlp.data.image.decode import decode_image, open_image
from vlp.data.shards.sample_files import BadSample
from vlp.io import atomic_write

Hashes = NDArray[np.uint64]
Places = NDArray[np.int64]

DISTANCE = 6
"""Bits of 64 in which two images that look alike may differ."""
FINE_DISTANCE = 48
"""Bits of 256 in which they may."""
FLAT = 3.0
"""Standard deviation of the coarse luminance (of 255) below which noise would set the bits."""

HASH_VERSION = 1
"""Raised whenever equal images get other hashes than before."""

READABLE, FLAT_IMAGE, UNREADABLE = 0, 1, 2

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
"""One image: 70 bytes."""

_ONES = np.array([number.bit_count() for number in range(1 << 16)], np.uint8)
_SIDE = 32
_LOW = 16


@dataclass(frozen=True, kw_only=True)
class NearOptions(WorkerOptions):
    """The list to write, and what counts as the same image."""

    out: Annotated[Path, Option(metavar="LIST", help="list of the keys to take out")]
    exact: Annotated[bool, Option("--exact", help="the same bytes only")] = False

    @property
    def most(self) -> int | None:
        """Return the bits of 64 in which alike images differ, None where equal bytes count."""
        return None if self.exact else DISTANCE

    def load(self, shards: Sequence[Shard], title: str) -> HashedImages:
        """Hash the images of shards, but for those whose hashes are kept."""
        folder = self.out.with_name(self.out.name + ".hashes")
        work = partial(_keep_hashes, folder=folder)
        parts = [np.load(kept) for _, kept in scan(work, shards, self.workers(), title)]
        shard = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        return HashedImages(shards, np.concatenate(parts), shard)


class HashedImages(NamedTuple):
    """All images of shards: RECORDs in order, and the place of each one's shard in `shards`."""

    shards: Sequence[Shard]
    records: NDArray[np.void]
    shard: Places

    def keys(self, images: Places, executor: Executor) -> Iterator[str]:
        """Yield the keys of images, which ascend, from the headers of their shards."""
        used, starts = np.unique(self.shard[images], return_index=True)
        samples = np.split(self.records["sample"][images], starts[1:])
        jobs = (SomeSamples(self.shards[one], numbers) for one, numbers in zip(used, samples))
        for keys in executor.map(_keys, jobs):
            yield from keys

    def kept_with_shared_keys(self, dropped: NDArray[np.bool_]) -> int:
        """Count samples that are kept though the list has their key, for one of another folder."""
        kept = self.records["key"][~dropped & ~self.records["second"]]
        return int(np.isin(kept, self.records["key"][dropped]).sum())


class SomeSamples(NamedTuple):
    """Samples of a shard whose keys are asked for."""

    shard: Shard
    numbers: Iterable[int]

    def __str__(self) -> str:
        return str(self.shard)


def hash_image(data: bytes, where: str = "the image") -> tuple[int, Hashes] | None:
    """Return the perceptual hashes of an encoded image, of 64 bits and of 256 (4 words).

    None for an image without structure, such as a single colour; raises BadSample.
    """
    try:
        with open_image(data, where) as image:
            gray = _reduced(image) if image.format in ("JPEG", "MPO") else None
    except Exception:  # of another format, or damaged: this decides which, and says so
        gray = None
    if gray is None:
        gray = decode_image(data, where).convert("L")
    small = gray.resize((_SIDE, _SIDE), Image.Resampling.BOX)
    luminance = np.asarray(small, dtype=np.float64)
    waves = _cosines()
    low = waves @ luminance @ waves.T
    # The squares of an orthonormal transform add up to those of the pixels.
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
        found = hash_image(data, where)
    except BadSample:
        state = UNREADABLE
    else:
        if found is None:
            state = FLAT_IMAGE
        else:
            coarse, fine = found
    exact = int.from_bytes(hashlib.sha256(data).digest()[:8], "little")
    return key, name, exact, coarse, fine, sample, second, state


def fine_distance(first: Hashes, second: Hashes) -> NDArray[np.int64]:
    """Count the bits in which hashes of 256 bits, (..., 4), differ."""
    return differing_bits(first, second).sum(-1)


def differing_bits(first: Hashes, second: Hashes) -> NDArray[np.int64]:
    """Count the bits in which words of 64 bits differ."""
    different = np.bitwise_xor(first, second)
    return _ONES[different[..., None].view(np.uint16)].sum(-1, dtype=np.int64)


def _keep_hashes(shard: Shard, folder: Path) -> Path:
    status = shard.path.stat()
    place = f"{shard.path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{HASH_VERSION}"
    kept = folder / f"{shard.path.stem}-{number_of(place):016x}.npy"
    if not kept.is_file():
        with ShardReader(shard.path) as opened:
            rows = [row for number in range(len(opened)) for row in _rows(opened, number)]
        # Several commands may keep hashes of the same shards in this folder.
        with atomic_write(kept, suffix=f".{os.getpid()}.tmp", error=ConfigError) as file:
            np.save(file, np.array(rows, dtype=RECORD))
    return kept


def _keys(wanted: SomeSamples) -> list[str]:
    with ShardReader(wanted.shard.path) as opened:
        return [opened.samples[number].key for number in wanted.numbers]


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
    """Return the luminance of a JPEG, decoded at 1/8 to 1/2 of its size where that does."""
    image.draft("L", (4 * _SIDE, 4 * _SIDE))
    image.load()
    with suppress(Exception):  # garbage beside the pixels does not make the image a bad one
        image = ImageOps.exif_transpose(image)
    return image.convert("L")


def _signs(block: NDArray[np.float64]) -> Hashes:
    """Compare values with their median; packed into words of 64 bits."""
    values = block.reshape(-1)
    middle = values.size // 2
    between = np.partition(values, (middle - 1, middle))[middle - 1 : middle + 1].sum() / 2
    return np.packbits(values > between).view("<u8")


@cache
def _cosines() -> NDArray[np.float64]:
    """Return the lowest rows of the orthonormal DCT-II, (coefficients, pixels)."""
    frequency, place = np.arange(_LOW)[:, None], np.arange(_SIDE)[None]
    waves = np.cos(np.pi * frequency * (2 * place + 1) / (2 * _SIDE)) * np.sqrt(2 / _SIDE)
    waves[0] /= np.sqrt(2)
    return waves
