"""Shards made by many processes, none of which outlives the build."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import connection
from typing import Any

from data_tools.builder.journal import Record
from data_tools.builder.write_shard import ShardJob, make_shard
from vlp.config import ConfigError

_AHEAD = 2  # jobs for each process, so that none waits for the list to be read


class BuildStopped(Exception):
    """The build was interrupted."""


def made(
    jobs: Iterator[ShardJob], processes: int, progress: Callable[[int], Any]
) -> Generator[tuple[Record, int], None, None]:
    """Make shards, each as soon as a process is free; they come as they are done.

    Args:
        jobs: the shards; read a little ahead.
        processes: how many work; with one, or a single job, this process does.
        progress: called with numbers of samples done.

    Raises:
        ConfigError: a process was killed from outside.
    """
    first = list(islice(jobs, 2))
    jobs = chain(first, jobs)
    if processes == 1 or len(first) < 2:
        for job in jobs:
            yield make_shard(job, lambda: progress(1))
        return
    stop = multiprocessing.Event()
    with ProcessPoolExecutor(processes, initializer=_begin, initargs=(stop,)) as executor:
        try:
            running: dict[Future[tuple[Record, int]], ShardJob] = {}
            while True:
                for job in islice(jobs, _AHEAD * processes - len(running)):
                    running[executor.submit(_make, job)] = job
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    progress(len(running.pop(future).items))
                    yield future.result()
        except BrokenProcessPool as error:
            raise ConfigError(
                "a worker process was killed (out of memory?); finished shards stay, run the same "
                "command again to go on, perhaps with fewer --processes"
            ) from error
        finally:
            stop.set()
            executor.shutdown(wait=True, cancel_futures=True)


_stop: Any = None


def _begin(stop: Any) -> None:
    global _stop
    _stop = stop
    # Ctrl-C is the parent's to handle: it stops the workers and clears up behind them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    # A parent that is killed tells nobody, and its workers would wait for work for ever.
    parent = multiprocessing.parent_process()
    assert parent is not None  # this runs in workers alone
    connection.wait([parent.sentinel])
    os._exit(1)


def _make(job: ShardJob) -> tuple[Record, int]:
    return make_shard(job, _tick)


def _tick() -> None:
    if _stop.is_set():
        raise BuildStopped
