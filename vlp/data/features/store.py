"""Stored features of images: a memory-mapped array per shard, and a header that names the tower.

`FOLDER/features.json` is the header; `FOLDER/S/SHARD.npy` holds (samples, views, tokens, width) of
source S, `SHARD.views.npy` (samples, views) codes, and `SHARD.images.npy` (samples,) CRC-32 of the
encoded images. `SHARD.npy` gets its name last.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from itertools import islice
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError
from torch import Tensor

from vlp.config import Config, ConfigError
from vlp.data.config import AugmentConfig
from vlp.data.image.transforms import Preprocessing
from vlp.data.shards.index import LRUCache, ShardTable, npy_header
from vlp.data.shards.sample_files import BadSample, DataError
from vlp.data.shards.shard_reader import ShardIndex
from vlp.io import write_json

HEADER_NAME = "features.json"
_ROWS_AT_ONCE = 2**13
MAKE = "vlp data features --config FILE --out FOLDER"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TowerKey(NamedTuple):
    """Identity of an image tower: its settings, and the SHA-256 of its weights."""

    settings: dict[str, Any]
    weights: str


class FeatureSource(Config):
    """One folder of shards with its `shards_sha256`."""

    name: str
    shards: PositiveInt
    samples: NonNegativeInt
    index: Sha256


class FeatureHeader(Config):
    """Tower, data, preprocessing and shape of stored features."""

    version: Literal[1] = 1
    tower: dict[str, Any]
    weights: Sha256
    image_size: PositiveInt
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    augment: AugmentConfig | None  # of all views but the first, which is not augmented
    views: PositiveInt
    seed: int
    precision: Literal["float32", "bf16"]  # of the tower
    dtype: Literal["float16", "bfloat16"]  # of the files; bfloat16 as its 16 bits
    tokens: PositiveInt  # of a view, [CLS] first
    width: PositiveInt
    kinds: tuple[str, ...]  # faults of bad samples, by code - BAD
    sources: tuple[FeatureSource, ...]

    def write(self, folder: Path) -> None:
        """Write `features.json`."""
        values = self.model_dump(mode="json")
        write_json(folder / HEADER_NAME, values, durable=True, error=ConfigError)

    @classmethod
    def read(cls, folder: Path) -> FeatureHeader:
        """Read `features.json`."""
        path = folder / HEADER_NAME
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read ({error.strerror}); write the features with: {MAKE}"
            ) from error
        except ValidationError as error:
            problem = error.errors()[0]
            field = "".join(f"{part}: " for part in problem["loc"])
            raise ConfigError(
                f"{path}: no header of features ({field}{problem['msg']}); delete the folder and "
                f"write the features again with: {MAKE}"
            ) from error

    def require_tower(self, folder: Path, tower: TowerKey) -> None:
        """Require that the features are of a tower; settings that the header lacks are empty."""
        stored = {name: self.tower.get(name, {}) for name in tower.settings}
        self._require_equal(folder, "tower", stored, tower.settings)
        self.require(folder, {"weights": tower.weights})

    def require(self, folder: Path, expected: dict[str, Any]) -> None:
        """Require values of some fields, given in JSON's types."""
        stored = self.model_dump(mode="json")
        for name, value in expected.items():
            self._require_equal(folder, name, stored[name], value)

    def _require_equal(self, folder: Path, name: str, stored: Any, expected: Any) -> None:
        if (difference := _difference(name, stored, expected)) is not None:
            raise ConfigError(
                f"{folder}: holds other features: {difference}; write features with these settings "
                f"by: {MAKE}"
            )


def shards_sha256(shards: ShardTable) -> str:
    """Return a hash of an index: names, samples and bytes of the shards, and of its rows."""
    # Of the JSON [file, [[name, samples, bytes], ...]], in parts: long for a million shards.
    digest = hashlib.sha256(f"[{json.dumps(shards.file)}, [".encode())
    rows, comma = iter(shards), ""
    while batch := [entry[:3] for entry in islice(rows, _ROWS_AT_ONCE)]:
        digest.update(f"{comma}{json.dumps(batch)[1:-1]}".encode())
        comma = ", "
    digest.update(b"]]")
    return digest.hexdigest()


def _difference(name: str, stored: Any, expected: Any) -> str | None:
    """Return the first leaf that differs as 'KEY is X there, Y here', or None."""
    if stored == expected:
        return None
    if isinstance(stored, dict) and isinstance(expected, dict):
        keys = dict.fromkeys([*stored, *expected])
        differences = (
            _difference(f"{name}.{key}", stored.get(key, "absent"), expected.get(key, "absent"))
            for key in keys
        )
        return next(difference for difference in differences if difference)
    return f"{name} is {stored!r} there, {expected!r} here"


# Codes of views; BAD + i: the sample has the fault `kinds[i]` of the header.
PLAIN, FLIPPED, BAD = 0, 1, 2

# NumPy has no bfloat16: its bits are stored.
FILE_DTYPES: dict[str, np.dtype] = {"float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2")}
CHECKSUM_DTYPE: np.dtype = np.dtype("<u4")

_MAX_OPEN_FILES = 128


class StoredFeatures:
    """A folder of features of several sources, written by `vlp data features`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.header = FeatureHeader.read(self.folder)

    def require(
        self,
        preprocessing: Preprocessing,
        indices: Sequence[ShardIndex],
        augment: AugmentConfig | None = None,
    ) -> list[SourceFeatures]:
        """Return the features of each index's samples; without `augment` only their first views."""
        expected: dict[str, Any] = {
            "image_size": preprocessing.image_size,
            "mean": [*preprocessing.mean],
            "std": [*preprocessing.std],
        }
        if augment is not None and self.header.augment is not None:
            expected["augment"] = augment.model_dump(mode="json")
        self.header.require(self.folder, expected)
        return [self._source_features(index, augment is None) for index in indices]

    def holds(self, index: ShardIndex) -> bool:
        """Return whether shards with this index are among the sources."""
        return shards_sha256(index.shards) in [source.index for source in self.header.sources]

    def _source_features(self, index: ShardIndex, first_only: bool) -> SourceFeatures:
        digests = [source.index for source in self.header.sources]
        digest = shards_sha256(index.shards)
        if digest not in digests:
            names = ", ".join(source.name for source in self.header.sources)
            raise ConfigError(
                f"{self.folder}: holds no features of {index.folder} as it is now, but of {names} "
                f"(their index must be the same); write them with: {MAKE}"
            )
        return SourceFeatures(self.folder, self.header, digests.index(digest), index, first_only)


def stored_sources(
    stores: Sequence[StoredFeatures], preprocessing: Preprocessing, indices: Sequence[ShardIndex]
) -> list[SourceFeatures]:
    """Return the features of each index's samples, first views only, from the folder with them."""
    features = []
    for index in indices:
        store = next((store for store in stores if store.holds(index)), stores[0])
        features += store.require(preprocessing, [index])
    return features


class SourceFeatures:
    """Features of source `number` of a folder, opened lazily; `blank` is a view of zeros."""

    def __init__(
        self, folder: Path, header: FeatureHeader, number: int, index: ShardIndex, first_only: bool
    ) -> None:
        self.folder, self.header, self.number = folder, header, number
        self._first_only = first_only  # a sample has only its first view
        dtype: torch.dtype = getattr(torch, header.dtype)
        self.blank = torch.zeros(header.tokens, header.width, dtype=dtype)
        self._shards = [(entry.name, entry.samples) for entry in index.shards]
        self._files: LRUCache[list[np.ndarray]] = LRUCache(_MAX_OPEN_FILES)
        incomplete = [
            shard
            for shard, (_, samples) in enumerate(self._shards)
            if not is_complete(header, self._paths(shard), samples)
        ]
        if incomplete:
            raise ConfigError(
                f"{folder}: features of {len(incomplete)} of {len(self._shards)} shards, the first "
                f"{self._shards[incomplete[0]][0]}, are missing or of another size; continue the "
                f"command that writes them: {MAKE}"
            )

    def views(self, shard: int, sample: int, image: bytes, may_flip: bool, where: str) -> list[int]:
        """Return the indices of a sample's views; unless `may_flip`, of unflipped views only.

        Raises BadSample for a bad image, DataError if `image` differs from the encoded image.
        """
        _, codes_of_samples, checksums = self._open(shard)
        # A shard may be rewritten with the same lengths, which leaves its index as it was.
        if zlib.crc32(image) != checksums[sample]:
            raise DataError(
                f"{where}: the image changed, or was unreadable when its features were stored; "
                f"delete {self._paths(shard)[0]} and write it again with: {MAKE}"
            )
        codes = codes_of_samples[sample].tolist()
        if codes[0] >= BAD:
            kinds = self.header.kinds[codes[0] - BAD :] or ("unreadable image",)  # if damaged
            raise BadSample(kinds[0], where)
        if self._first_only:
            return [0]
        return [view for view, code in enumerate(codes) if may_flip or code == PLAIN]

    def read(self, shard: int, sample: int, view: int) -> Tensor:
        """Return the tokens of one view, (tokens, width) float16 or bfloat16."""
        bits = np.array(self._open(shard)[0][sample, view]).view(np.int16)
        return torch.from_numpy(bits).view(self.blank.dtype)

    def _open(self, shard: int) -> list[np.ndarray]:
        """Return a shard's features, codes of views, and checksums of images."""

        def load() -> list[np.ndarray]:
            features, *others = self._paths(shard)
            return [np.load(features, mmap_mode="r"), *map(np.load, others)]

        return self._files.get(shard, load)

    def _paths(self, shard: int) -> list[Path]:
        return file_paths(self.folder, self.number, self._shards[shard][0])

    def __getstate__(self) -> dict[str, Any]:
        # Pickling a memory map would copy its content.
        return self.__dict__ | {"_files": LRUCache(_MAX_OPEN_FILES)}


def file_paths(folder: Path, source: int, shard: str) -> list[Path]:
    """Return the paths of a shard's features, codes of views, and checksums of images."""
    stem = shard.removesuffix(".tar")
    return [folder / str(source) / f"{stem}{end}" for end in (".npy", ".views.npy", ".images.npy")]


def layouts(header: FeatureHeader, samples: int) -> list[tuple[np.dtype, tuple[int, ...]]]:
    """Return dtype and shape of the files of a shard, in the order of `file_paths`."""
    views = samples, header.views
    features = FILE_DTYPES[header.dtype], (*views, header.tokens, header.width)
    return [features, (np.dtype("u1"), views), (CHECKSUM_DTYPE, (samples,))]


def is_complete(header: FeatureHeader, paths: Sequence[Path], samples: int) -> bool:
    """Return whether all files of a shard of `samples` samples exist in full length."""
    for path, (dtype, shape) in zip(paths, layouts(header, samples), strict=True):
        start = npy_header(dtype, shape)
        try:
            if path.stat().st_size != len(start) + dtype.itemsize * prod(shape):
                return False
            with path.open("rb") as file:
                if file.read(len(start)) != start:
                    return False
        except FileNotFoundError:
            return False
    return True
