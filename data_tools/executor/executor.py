"""Execution of a data tool's tasks: one function, one job for each shard, and a ledger of results.

Jobs hold paths and few numbers, never data, so that any machine of a cluster can do them. Where
they are done changes no result: `local`, `ray_cluster` and `slurm` are the places there are.
"""

from __future__ import annotations

import os
import pickle
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from functools import partial, reduce
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

from vlp import __version__
from vlp.config import ConfigError
from vlp.io import atomic_write

Job = TypeVar("Job")
Result = TypeVar("Result")

_IN_FLIGHT = 4
"""Jobs for each worker; results wait for the slowest job before them, and are held meanwhile."""

stopping = threading.Event()
"""Set in a worker process whose command was interrupted or has failed."""


class WorkStopped(Exception):
    """Work that nobody waits for any more."""


def go_on() -> None:
    """End work that nobody waits for; all work of an executor calls it often.

    Raises:
        WorkStopped: the command was interrupted, or has failed.
    """
    if stopping.is_set():
        raise WorkStopped


class Executor(ABC):
    """A place where tasks are done, several at a time."""

    @abstractmethod
    def results(
        self, work: Callable[[Job], Result], jobs: Iterable[Job], ordered: bool
    ) -> Iterator[Result]:
        """Yield results; arguments and errors as of `map`, which every caller uses."""

    def map(
        self,
        work: Callable[[Job], Result],
        jobs: Iterable[Job],
        *,
        ordered: bool = True,
        ledger: Path | None = None,
    ) -> Iterator[Result]:
        """Yield what `work` makes of each job; jobs are taken from their iterator a few ahead.

        Args:
            work: a function that can be pickled; what it returns travels between processes.
            jobs: each says in `str` what it is.
            ordered: results come in the order of the jobs; else as soon as they are ready.
            ledger: folder from `open_ledger`; results travel through it, and jobs whose result is
                there are not done again.

        Raises:
            ConfigError: a worker was lost, and trying again, where that may help, did not help.
        """
        if ledger is None:
            return self.results(work, jobs, ordered)
        return map(_loaded, self.results(partial(_kept, work, ledger), jobs, ordered))

    def reduce(
        self,
        work: Callable[[Job], Result],
        jobs: Iterable[Job],
        join: Callable[[Result, Result], Result],
        *,
        run: int,
        ledger: Path | None = None,
    ) -> Iterator[Result]:
        """Yield the joined results of each `run` jobs in a row: the first level of a tree.

        A run is one task. So a command of a million jobs joins thousands of results itself.
        """
        rest = iter(jobs)
        runs = iter(lambda: tuple(islice(rest, run)), ())
        return self.map(partial(_joined, work, join), runs, ledger=ledger)


@contextmanager
def open_ledger(folder: Path) -> Iterator[Path]:
    """Keep the results of finished tasks in a folder until the command has ended well.

    Raises:
        ConfigError: the folder is another user's, whose pickles must not be opened.
    """
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror})") from error
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder}: belongs to another user; delete it")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def in_flight(
    submit: Callable[[Job], Future[Result]],
    jobs: Iterable[Job],
    workers: int,
    ordered: bool,
    lost: tuple[type[BaseException], ...],
) -> Iterator[Result]:
    """Yield results of jobs that are submitted a few ahead.

    Raises:
        ConfigError: an error of `lost`, which says that a worker died.
    """
    rest = iter(jobs)
    waiting: dict[Future[Result], Job] = {}
    try:
        while True:
            for job in islice(rest, _IN_FLIGHT * workers - len(waiting)):
                waiting[submit(job)] = job
            if not waiting:
                return
            if ordered:
                ready = next(iter(waiting))
            else:
                ready = next(iter(wait(waiting, return_when=FIRST_COMPLETED).done))
            yield ready.result()
            del waiting[ready]
    except lost as error:
        place = "its start"
        if waiting:
            place = f"{shorten(str(next(iter(waiting.values()))), 200)}, or soon after it"
        raise lost_worker(place) from error


def lost_worker(place: str) -> ConfigError:
    """Return the error of a worker that died at a job."""
    return ConfigError(
        f"a process died at {place}: a worker process was killed (out of memory?) or crashed "
        "in a decoder; finished shards stay, run the same command again to go on, perhaps "
        "with fewer --processes; --executor local --processes 1 shows where"
    )


def _joined(
    work: Callable[[Job], Result], join: Callable[[Result, Result], Result], jobs: tuple[Job, ...]
) -> Result:
    return reduce(join, map(work, jobs))


def _kept(work: Callable[[Job], Any], ledger: Path, job: Job) -> Path:
    """Do a job unless its result is there; returns the result's path."""
    kept = ledger / f"{_fingerprint(work, job)}.pickle"
    if not kept.is_file():
        result = work(job)
        with atomic_write(kept, suffix=f".{os.getpid()}.tmp", error=ConfigError) as file:
            pickle.dump(result, file, pickle.HIGHEST_PROTOCOL)
    return kept


def _fingerprint(work: Callable[[Any], Any], job: Any) -> str:
    """Return a name for a result: of the work, its settings, the job, and the files it reads."""
    digest = blake2b(pickle.dumps((__version__, work, job)), digest_size=16)
    for each in job if type(job) is tuple else (job,):
        path = each if isinstance(each, Path) else getattr(each, "path", None)
        if path is not None and path.is_file():
            status = path.stat()
            digest.update(f"{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _loaded(kept: Path) -> Any:
    return pickle.loads(kept.read_bytes())
