"""Stored features of images: one memory-mapped array a shard, and a header that says whose.

`FOLDER/features.json` is the header; `FOLDER/S/SHARD.npy` holds (samples, views, tokens, width) of
shard SHARD of source S, and `SHARD.views.npy` (samples, views) a code of each view. The array gets
its name last: a shard that has one is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlp.config import ConfigError
from vlp.data.config import AugmentConfig
from vlp.data.features.header import MAKE, FeatureHeader, TowerKey, shards_sha256
from vlp.data.image.transforms import Preprocessing
from vlp.data.shards.lru import LRUCache
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.shard_index import ShardIndex

PLAIN, FLIPPED, BAD = 0, 1, 2
"""Codes of a view; a bad sample's are BAD plus the number of its kind in the header."""

# As bits: NumPy has no bfloat16.
FILE_DTYPES: dict[str, np.dtype] = {"float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2")}
CODE_DTYPE: np.dtype = np.dtype("u1")

_FILES_KEPT = 128


class StoredFeatures:
    """A whole folder of features.

    Args:
        folder: of `vlp data features`.

    Raises:
        ConfigError: it cannot be read, or is not complete.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.header = FeatureHeader.read(self.folder)

    def require(
        self,
        preprocessing: Preprocessing,
        indices: Sequence[ShardIndex],
        augment: AugmentConfig | None = None,
    ) -> list[SourceFeatures]:
        """Return the features of each index's samples.

        Args:
            preprocessing: that they must have been made with.
            indices: of the shards; a part of the folder's sources, in any order.
            augment: that of their views from the second on; None: the first alone is given.

        Raises:
            ConfigError: they were made otherwise or of other shards, or are not complete.
        """
        wanted: dict[str, Any] = {
            "image_size": preprocessing.image_size,
            "mean": [*preprocessing.mean],
            "std": [*preprocessing.std],
        }
        if augment is not None and self.header.augment is not None:
            wanted["augment"] = augment.model_dump(mode="json")
        self.header.require(self.folder, wanted)
        return [self._of(index, augment is None) for index in indices]

    def require_tower(self, tower: TowerKey) -> None:
        """Require that a tower made them; errors as of `FeatureHeader.require`."""
        self.header.require_tower(self.folder, tower)

    def holds(self, index: ShardIndex) -> bool:
        """Return whether these shards, as they are now, are among the sources."""
        return shards_sha256(index.shards) in [source.index for source in self.header.sources]

    def _of(self, index: ShardIndex, plain: bool) -> SourceFeatures:
        known = [source.index for source in self.header.sources]
        own = shards_sha256(index.shards)
        if own not in known:
            names = ", ".join(source.name for source in self.header.sources)
            raise ConfigError(
                f"{self.folder}: holds no features of {index.folder} as it is now (it has {names}; "
                f"the index of shards must be the same); make them with: {MAKE}"
            )
        return SourceFeatures(self.folder, self.header, known.index(own), index, plain)


def stored_sources(
    stores: Sequence[StoredFeatures], preprocessing: Preprocessing, indices: Sequence[ShardIndex]
) -> list[SourceFeatures]:
    """Return the features of each index's samples, plain views, from the folder that has them.

    Raises:
        ConfigError: as of `StoredFeatures.require`; of the first folder where none has them.
    """
    found = []
    for index in indices:
        store = next((each for each in stores if each.holds(index)), stores[0])
        found += store.require(preprocessing, [index])
    return found


class SourceFeatures:
    """Features of one folder of shards; every file is opened when it is first read.

    Args:
        folder: of all features.
        header: the folder's.
        number: of the source there.
        index: of its shards.
        plain: `views` gives the first alone.

    Attributes:
        blank: zeros, in the shape and type of one view.

    Raises:
        ConfigError: features of a shard are missing, or of another size than the header says.
    """

    def __init__(
        self,
        folder: Path,
        header: FeatureHeader,
        number: int,
        index: ShardIndex,
        plain: bool,
    ) -> None:
        self.folder, self.header, self.number, self.plain = folder, header, number, plain
        dtype: torch.dtype = getattr(torch, header.dtype)
        self.blank = torch.zeros(header.tokens, header.width, dtype=dtype)
        self._shards = [(entry.name, entry.samples) for entry in index.shards]
        self._files: LRUCache[tuple[np.ndarray, np.ndarray]] = LRUCache(_FILES_KEPT)
        missing = [shard for shard in range(len(self._shards)) if not self._is_whole(shard)]
        if missing:
            raise ConfigError(
                f"{self._paths(missing[0])[0]}: missing or of another size, as {len(missing)} of "
                f"{len(self._shards)} files of features are; run the command that makes them "
                f"again: {MAKE}"
            )

    def views(self, shard: int, sample: int, flipped: bool, where: str) -> list[int]:
        """Return a sample's views; those that are flipped only where `flipped` says so.

        Raises:
            BadSample: there was no image when the features were made; `where` names the place.
        """
        codes = self._open(shard)[1][sample].tolist()
        if codes[0] >= BAD:
            kinds = self.header.kinds[codes[0] - BAD :] or ("unreadable image",)  # a damaged code
            raise BadSample(kinds[0], where)
        if self.plain:
            return [0]
        return [view for view, code in enumerate(codes) if flipped or code == PLAIN]

    def read(self, shard: int, sample: int, view: int) -> Tensor:
        """Return the tokens of one view, (tokens, width) float16 or bfloat16."""
        bits = np.array(self._open(shard)[0][sample, view]).view(np.int16)
        return torch.from_numpy(bits).view(self.blank.dtype)

    def _open(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        def mapped() -> tuple[np.ndarray, np.ndarray]:
            features, codes = self._paths(shard)
            return np.load(features, mmap_mode="r"), np.load(codes)

        return self._files.get(shard, mapped)

    def _paths(self, shard: int) -> tuple[Path, Path]:
        return file_paths(self.folder, self.number, self._shards[shard][0])

    def _is_whole(self, shard: int) -> bool:
        return is_whole(self.header, self._paths(shard), self._shards[shard][1])

    def __getstate__(self) -> dict[str, Any]:
        # Maps would be sent as what they map.
        return self.__dict__ | {"_files": LRUCache(_FILES_KEPT)}


def file_paths(folder: Path, source: int, shard: str) -> tuple[Path, Path]:
    """Return the files of one shard: its features, and the codes of their views."""
    stem = folder / str(source) / shard.removesuffix(".tar")
    return stem.with_name(f"{stem.name}.npy"), stem.with_name(f"{stem.name}.views.npy")


def array_start(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the bytes of a .npy file before its numbers."""
    start = BytesIO()
    np.lib.format.write_array_header_1_0(
        start, {"descr": dtype.str, "fortran_order": False, "shape": shape}
    )
    return start.getvalue()


def is_whole(header: FeatureHeader, paths: tuple[Path, Path], samples: int) -> bool:
    """Return whether both files of a shard of so many samples are there, in full length."""
    codes = samples, header.views
    features = *codes, header.tokens, header.width
    arrays = (FILE_DTYPES[header.dtype], features), (CODE_DTYPE, codes)
    for path, (dtype, shape) in zip(paths, arrays):
        start = array_start(dtype, shape)
        try:
            if path.stat().st_size != len(start) + dtype.itemsize * prod(shape):
                return False
            with path.open("rb") as file:
                if file.read(len(start)) != start:
                    return False
        except FileNotFoundError:
            return False
    return True
