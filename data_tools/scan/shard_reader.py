"""Reading of shards by the data tools: one shard at a time, by any executor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from tqdm import tqdm

from data_tools.executor.executor import Executor, go_on
from vlp.config import ConfigError
from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import (
    BadSample,
    RawSample,
    SampleFiles,
    contents,
    parse,
    parse_annotation,
)
from vlp.data.shards.tar import Member

Result = TypeVar("Result")

_MOST_RESULTS = 4096


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


class ShardReader:
    """One shard open for reading: its samples in order, and what is wrong behind them.

    `with ShardReader(path) as shard: shard.read(0)`. A shard that cannot be opened has no samples
    and is `missing`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        found = contents(path)
        self.samples: list[SampleFiles] = found.samples
        self.problem = found.problem
        self.missing = found.missing
        self._file = -1 if found.missing else os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, number: int) -> RawSample:
        """Return a sample with its images; raises BadSample where it cannot be used."""
        return parse(self.samples[number], self.content, self.where(number))

    def annotation(self, number: int) -> Annotation:
        """Return a sample's annotation, its images left unread; raises BadSample."""
        return parse_annotation(self.samples[number], self.content, self.where(number))

    def where(self, number: int) -> str:
        """Return the place of a sample, for people."""
        return f"{self.path}, {self.samples[number].key}"

    def content(self, member: Member) -> bytes:
        """Return the bytes of a member; raises BadSample where the shard ends before they do."""
        go_on()
        try:
            data = os.pread(self._file, member.size, member.offset)
        except OSError as error:
            raise BadSample("corrupt shard", f"{self.path} ({error.strerror})") from error
        if len(data) != member.size:
            raise BadSample("corrupt shard", f"{self.path}: cut off inside {member.name}")
        return data


def shards_of(folders: Sequence[Path]) -> list[Shard]:
    """Return every `*.tar` of the folders, in the order of the folders and of the names.

    Raises:
        ConfigError: a folder does not exist, holds no shard, or is given twice.
    """
    seen: set[Path] = set()
    shards: list[Shard] = []
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder of shards")
        if folder.resolve() in seen:
            raise ConfigError(f"{folder}: is given twice")
        seen.add(folder.resolve())
        names = sorted(path.name for path in folder.glob("*.tar"))
        if not names:
            from vlp.data.shards.index import no_shards_in  # here, so that help needs no NumPy

            raise ConfigError(no_shards_in(folder))
        shards.extend(Shard(folder, name) for name in names)
    return shards


def scan(
    work: Callable[[Shard], Result],
    shards: Sequence[Shard],
    executor: Executor,
    title: str,
    *,
    join: Callable[[Result, Result], Result] | None = None,
    ledger: Path | None = None,
) -> Iterator[tuple[Shard, Result]]:
    """Yield every shard and what `work` makes of it, with a progress bar in bytes of shards.

    Args:
        work: as of `Executor.map`.
        shards: from `shards_of`.
        executor: reads the shards.
        title: of the progress bar.
        join: joins the results of neighbours, of which thousands would come; each comes with the
            first of its shards.
        ledger: as of `Executor.map`.
    """
    run = 1 if join is None else max(1, len(shards) // _MOST_RESULTS)
    if join is None:
        results = executor.map(work, shards, ledger=ledger)
    else:
        results = executor.reduce(work, shards, join, run=run, ledger=ledger)
    sizes = [shard.path.stat().st_size if shard.path.is_file() else 0 for shard in shards]
    with tqdm(total=sum(sizes), desc=title, unit="B", unit_scale=True) as bar:
        for start, result in zip(range(0, len(shards), run), results):
            yield shards[start], result
            bar.update(sum(sizes[start : start + run]))
