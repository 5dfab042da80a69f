"""All samples of some folders of shards, one shard at a time, shared out among processes."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from tqdm import tqdm

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

Job = TypeVar("Job")
Result = TypeVar("Result")

# For each process; results wait for the slowest shard before them, and are held meanwhile.
_IN_FLIGHT = 4
_WATCH_SECONDS = 0.5


class ScanStopped(Exception):
    """Nobody waits for this work any more."""


_stopping = threading.Event()


def go_on() -> None:
    """Called often by all work that other processes do; ends it when nobody waits for it.

    Raises:
        Stopped: the command was interrupted, or has failed.
    """
    if _stopping.is_set():
        raise ScanStopped


class Shard(NamedTuple):
    """A tar of a folder."""

    folder: Path
    name: str

    @property
    def path(self) -> Path:
        """Where the tar lies."""
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
        """A sample with its images; raises BadSample where it cannot be used."""
        return parse(self.samples[number], self.content, self.where(number))

    def annotation(self, number: int) -> Annotation:
        """A sample's annotation, its images left unread; raises BadSample."""
        return parse_annotation(self.samples[number], self.content, self.where(number))

    def where(self, number: int) -> str:
        """The place of a sample, for people."""
        return f"{self.path}, {self.samples[number].key}"

    def content(self, member: Member) -> bytes:
        """The bytes of a member; raises BadSample where the shard ends before they do."""
        go_on()
        try:
            data = os.pread(self._file, member.size, member.offset)
        except OSError as error:
            raise BadSample("corrupt shard", f"{self.path} ({error.strerror})") from error
        if len(data) != member.size:
            raise BadSample("corrupt shard", f"{self.path}: cut off inside {member.name}")
        return data


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Declare how many processes share the work."""
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="shards that are read at the same time (default: one for each core)",
    )


def shards_of(folders: Sequence[Path]) -> list[Shard]:
    """Every `*.tar` of the folders, in the order of the folders and of the names.

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
            raise ConfigError(f"{folder}: holds no shards (*.tar)")
        shards.extend(Shard(folder, name) for name in names)
    return shards


def scan(
    work: Callable[[Shard], Result], shards: Sequence[Shard], processes: int, title: str
) -> Iterator[tuple[Shard, Result]]:
    """`work` on every shard, by several processes, with a progress bar in bytes of shards.

    Args:
        work: a function that can be pickled; what it returns travels between processes.
        shards: from `shards_of`.
        processes: 1 works in this process.
        title: of the progress bar.

    Yields:
        Shards and results in the order of `shards`, whichever is ready first. Few of them are held
        at a time, however many there are.

    Raises:
        ConfigError: `processes` is no number of processes, or one of them died.
    """
    sizes = [shard.path.stat().st_size if shard.path.is_file() else 0 for shard in shards]
    with tqdm(total=sum(sizes), desc=title, unit="B", unit_scale=True) as bar:
        for shard, size, result in zip(shards, sizes, in_order(work, shards, processes)):
            yield shard, result
            bar.update(size)


def in_order(
    work: Callable[[Job], Result], jobs: Iterable[Job], processes: int
) -> Iterator[Result]:
    """What `work` makes of each job, in the order of the jobs; the rest as in `scan`.

    Jobs are taken from their iterator a few ahead of the work.
    """
    if processes < 1:
        raise ConfigError(f"--processes is {processes}, at least 1")
    rest = iter(jobs)
    first = list(islice(rest, processes))
    rest = chain(first, rest)
    if len(first) < 2:
        yield from map(work, rest)
        return
    # Workers hold the reading end of a pipe, which ends when this process closes it or dies.
    reading, writing = os.pipe()
    pool = ProcessPoolExecutor(
        len(first),
        multiprocessing.get_context("fork"),
        initializer=_begin,
        initargs=(os.getpid(), reading, writing),
    )
    waiting: deque[tuple[Job, Future[Result]]] = deque()
    try:
        while True:
            for job in islice(rest, _IN_FLIGHT * len(first) - len(waiting)):
                waiting.append((job, pool.submit(work, job)))
            if not waiting:
                return
            yield waiting[0][1].result()
            waiting.popleft()
    except BrokenProcessPool as error:
        place = f"{waiting[0][0]}, or soon after it" if waiting else "its start"
        raise ConfigError(
            f"a process died at {place} (killed, out of memory, or a crash in a decoder); "
            "--processes 1 shows where"
        ) from error
    except BaseException:
        os.close(writing)  # nobody waits for what is under way
        writing = -1
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for end in (reading, writing):
            if end >= 0:
                os.close(end)


def _begin(parent: int, reading: int, writing: int) -> None:
    # Ctrl-C reaches every process of a terminal; it is the parent's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.close(writing)
    threading.Thread(target=_leave_with, args=(parent, reading), daemon=True).start()


def _leave_with(parent: int, reading: int) -> None:
    os.read(reading, 1)
    # The work ends by itself, at its next read: a process that died while it sends a result would
    # leave its parent waiting for the rest of it.
    _stopping.set()
    # A parent that was killed tells nobody, and waiting for its next job would take for ever.
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)
