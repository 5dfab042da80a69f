"""Process pool of all data tools: bounded look-ahead, and no process outlives its command."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from textwrap import shorten
from typing import TypeVar

from vlp.config import ConfigError

Job = TypeVar("Job")
Result = TypeVar("Result")

# For each process; results wait for the slowest job before them, and are held meanwhile.
_IN_FLIGHT = 4
_WATCH_SECONDS = 0.5


class WorkStopped(Exception):
    """Work that nobody waits for any more."""


_stopping = threading.Event()


def go_on() -> None:
    """End work that nobody waits for; all work of a pool calls it often.

    Raises:
        WorkStopped: the command was interrupted, or has failed.
    """
    if _stopping.is_set():
        raise WorkStopped


def add_processes(
    parser: argparse._ActionsContainer, what: str = "shards that are read at the same time"
) -> None:
    """Declare how many processes share the work."""
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help=f"{what} (default: one for each core)",
    )


def in_order(
    work: Callable[[Job], Result], jobs: Iterable[Job], processes: int, *, ordered: bool = True
) -> Iterator[Result]:
    """Yield what `work` makes of each job; jobs are taken from their iterator a few ahead.

    Args:
        work: a function that can be pickled; what it returns travels between processes.
        jobs: each says in `str` what it is.
        processes: how many work; with one, or a single job, this process does.
        ordered: results come in the order of the jobs; else as soon as they are ready.

    Raises:
        ConfigError: `processes` is no number of processes, or one of them was killed.
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
    waiting: dict[Future[Result], Job] = {}
    try:
        while True:
            for job in islice(rest, _IN_FLIGHT * len(first) - len(waiting)):
                waiting[pool.submit(work, job)] = job
            if not waiting:
                return
            if ordered:
                ready = next(iter(waiting))
            else:
                ready = next(iter(wait(waiting, return_when=FIRST_COMPLETED).done))
            yield ready.result()
            del waiting[ready]
    except BrokenProcessPool as error:
        place = "its start"
        if waiting:
            place = f"{shorten(str(next(iter(waiting.values()))), 200)}, or soon after it"
        raise ConfigError(
            f"a process died at {place}: a worker process was killed (out of memory?) or crashed "
            "in a decoder; finished shards stay, run the same command again to go on, perhaps "
            "with fewer --processes; --processes 1 shows where"
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
