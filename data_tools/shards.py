"""Shards as the data tools read them: one at a time, by any executor, and keys that repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data_tools.executor import Executor, go_on
from vlp.config import ConfigError
from vlp.data.shards.index import INDEX_NAME, no_shards_in
from vlp.data.shards.sample_files import Contents, ShardFile
from vlp.data.shards.shard_reader import ShardIndex
from vlp.data.shards.tar import Member, open_tar

Result = TypeVar("Result")


class Shard(NamedTuple):
    """A tar of a folder."""

    folder: Path
    name: str

    @property
    def path(self) -> Path:
        """Return the path of the tar."""
        return self.folder / self.name

    def __str__(self) -> str:
        return str(self.path)


class ShardReader(ShardFile):
    """One open shard, its samples in order, and the problem behind them (`missing`: unreadable)."""

    path: Path

    def __init__(self, path: Path) -> None:
        try:
            super().__init__(open_tar(path), path)
            shard_contents = self.list_samples()
        except OSError as error:
            self.handle, self.path = -1, path
            shard_contents = Contents([], error.strerror or str(error), missing=True)
        self.samples, self.problem, self.missing = shard_contents

    def close(self) -> None:
        """Close the file if open."""
        if self.handle >= 0:
            super().close()

    def __len__(self) -> int:
        return len(self.samples)

    def content(self, member: Member) -> bytes:
        """Return the bytes of a file in the tar, unless the command was interrupted."""
        go_on()
        return super().content(member)


def shards_of(folders: Sequence[Path]) -> list[Shard]:
    """Return every `*.tar` of the folders, in the order of the folders and of the names.

    Raises ConfigError where the index of a folder lists other shards.
    """
    folders_read: set[Path] = set()
    shards: list[Shard] = []
    for folder in folders:
        shards += tars_in(folder)
        if folder.resolve() in folders_read:
            raise ConfigError(f"{folder}: is given twice")
        folders_read.add(folder.resolve())
        if (folder / INDEX_NAME).exists():
            ShardIndex.open(folder)
    return shards


def tars_in(folder: Path) -> list[Shard]:
    """Return every `*.tar` of a folder in the order of the names, whatever its index lists."""
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
    """Yield every shard and its result of `work`, with a progress bar in bytes."""
    sizes = [shard.path.stat().st_size if shard.path.is_file() else 0 for shard in shards]
    with tqdm(total=sum(sizes), desc=title, unit="B", unit_scale=True) as bar:
        for shard, size, result in zip(shards, sizes, executor.map(work, shards, ledger=ledger)):
            yield shard, result
            bar.update(size)


Numbers = NDArray[np.uint64]


def number_of(name: str) -> int:
    """Hash a name to 64 bits; among a billion names two share one with a chance of 3 %."""
    digest = blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def numbers_of(names: Iterable[str]) -> Numbers:
    """Return `number_of` each name."""
    return np.fromiter((number_of(name) for name in names), dtype=np.uint64)


class Repeated(NamedTuple):
    """Number of different numbers, and the repeated ones (sorted)."""

    distinct: int
    values: Numbers


def repeated(numbers: Sequence[Numbers]) -> Repeated:
    """Count different numbers, and find those that come more than once."""
    values, counts = np.unique(
        np.concatenate([np.empty(0, np.uint64), *numbers]), return_counts=True
    )
    return Repeated(len(values), values[counts > 1])


def keys_in(shard: ShardReader) -> list[str]:
    """Return the keys of a shard in order."""
    return [sample.key for sample in shard.samples]


def repeated_keys(
    shards: Sequence[Shard], repeated: Numbers, executor: Executor
) -> Iterator[tuple[Shard, str]]:
    """Yield every occurrence of keys with `number_of` among `repeated`, in order."""
    work = partial(_repeated, repeated=repeated)
    for shard, names in scan(work, shards, executor, "repeated keys"):
        for name in names:
            yield shard, name


def _repeated(shard: Shard, repeated: Numbers) -> list[str]:
    with ShardReader(shard.path) as opened:
        names = keys_in(opened)
    return [names[number] for number in np.flatnonzero(np.isin(numbers_of(names), repeated))]
