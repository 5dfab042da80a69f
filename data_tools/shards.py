"""Shards as the data tools read them, one job per shard, and keys that occur more than once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data_tools.executor import Executor, raise_if_stopped
from vlp.config import ConfigError
from vlp.data.shards.index import INDEX_NAME, no_shards_in
from vlp.data.shards.sample_files import Contents, ShardFile
from vlp.data.shards.shard_reader import ShardIndex
from vlp.data.shards.tar import Member, open_tar

Result = TypeVar("Result")


class Shard(NamedTuple):
    """A tar in a folder of shards."""

    folder: Path
    name: str

    @property
    def path(self) -> Path:
        """Return the path of the tar."""
        return self.folder / self.name

    def __str__(self) -> str:
        return str(self.path)


class ShardReader(ShardFile):
    """An open shard: `samples` in order, `problem` after them, `missing` if it cannot be opened."""

    path: Path

    def __init__(self, path: Path) -> None:
        try:
            super().__init__(open_tar(path), path)
            shard_contents = self.list_samples()
        except OSError as error:
            self.handle, self.path = -1, path
            shard_contents = Contents([], error.strerror or str(error), missing=True)
        self.samples, self.problem, self.missing = shard_contents

    @property
    def keys(self) -> list[str]:
        """Return the keys of the samples in order."""
        return [sample.key for sample in self.samples]

    def close(self) -> None:
        """Close the file if open."""
        if self.handle >= 0:
            super().close()

    def content(self, member: Member) -> bytes:
        """Return the bytes of a file in the tar, unless the command was interrupted."""
        raise_if_stopped()
        return super().content(member)


def shards_of(folders: Sequence[Path]) -> list[Shard]:
    """Return every `*.tar` of the folders, by folder, then by name.

    Raises ConfigError if a folder's index lists other shards.
    """
    folders_read: set[Path] = set()
    shards: list[Shard] = []
    for folder in folders:
        shards += tars_in(folder)
        if folder.resolve() in folders_read:
            raise ConfigError(f"{folder}: listed twice; name each folder once")
        folders_read.add(folder.resolve())
        if (folder / INDEX_NAME).exists():
            ShardIndex.open(folder)
    return shards


def tars_in(folder: Path) -> list[Shard]:
    """Return every `*.tar` of a folder by name, also if its index does not list it."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder of shards")
    names = sorted(path.name for path in folder.glob("*.tar"))
    if not names:
        raise ConfigError(no_shards_in(folder))
    return [Shard(folder, name) for name in names]


def scan(
    work: Callable[[Shard], Result],
    shards: Sequence[Shard],
    executor: Executor,
    title: str,
    *,
    ledger: Path | None = None,
) -> Iterator[tuple[Shard, Result]]:
    """Yield each shard with its result of `work`, in order, with a progress bar in bytes."""
    sizes = [shard.path.stat().st_size if shard.path.is_file() else 0 for shard in shards]
    with tqdm(total=sum(sizes), desc=title, unit="B", unit_scale=True) as bar:
        for shard, size, result in zip(shards, sizes, executor.map(work, shards, ledger=ledger)):
            yield shard, result
            bar.update(size)


NameHashes = NDArray[np.uint64]


def hash_name(name: str) -> int:
    """Hash a name to 64 bits; among a billion names, any two share a hash with probability 3 %."""
    digest = blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def hash_names(names: Iterable[str]) -> NameHashes:
    """Hash names to 64 bits each, (names,)."""
    return np.fromiter((hash_name(name) for name in names), dtype=np.uint64)


def find_repeated(hashes: Sequence[NameHashes]) -> tuple[int, NameHashes]:
    """Return the number of distinct hashes in all arrays, and the sorted hashes that repeat."""
    values, counts = np.unique(
        np.concatenate([np.empty(0, np.uint64), *hashes]), return_counts=True
    )
    return len(values), values[counts > 1]


def repeated_keys(
    shards: Sequence[Shard], hashes: NameHashes, executor: Executor
) -> Iterator[tuple[Shard, str]]:
    """Yield (shard, key) of samples, in order, with a key that has one of the `hashes`."""
    work = partial(_keys_with, hashes=hashes)
    for shard, keys in scan(work, shards, executor, "repeated keys"):
        for key in keys:
            yield shard, key


def _keys_with(shard: Shard, hashes: NameHashes) -> list[str]:
    with ShardReader(shard.path) as reader:
        keys = reader.keys
    return [keys[index] for index in np.flatnonzero(np.isin(hash_names(keys), hashes))]
