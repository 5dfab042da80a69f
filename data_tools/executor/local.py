"""Tasks in processes of this machine, or in this process; none of them outlives its command."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from itertools import chain, islice
from multiprocessing.connection import Connection
from typing import Literal

from data_tools.executor.executor import Executor, Job, Result, in_flight, stopping
from vlp.config import ConfigError

_WATCH_SECONDS = 0.5


class LocalExecutor(Executor):
    """Processes of this machine; with one, or a single job, this process does the work.

    Args:
        processes: that work at a time.
        fresh: every job is done by a spawned process, which has nothing of this one: a process
            that holds threads of torch must not be copied.

    Raises:
        ConfigError: `processes` is no number of processes.
    """

    def __init__(self, processes: int = os.cpu_count() or 1, fresh: bool = False) -> None:
        if processes < 1:
            raise ConfigError(f"--processes is {processes}, at least 1")
        self._processes, self._fresh = processes, fresh

    def results(
        self, work: Callable[[Job], Result], jobs: Iterable[Job], ordered: bool
    ) -> Iterator[Result]:
        """Yield results; a worker that dies ends the command."""
        rest = iter(jobs)
        first = list(islice(rest, self._processes))
        rest = chain(first, rest)
        if len(first) < (1 if self._fresh else 2):
            yield from map(work, rest)
            return
        with _pool(len(first), "spawn" if self._fresh else "fork") as pool:

            def submit(job: Job) -> Future[Result]:
                with _ctrl_c_waits():  # the first one starts processes and a thread
                    return pool.submit(work, job)

            yield from in_flight(submit, rest, len(first), ordered, (BrokenProcessPool,))


@contextmanager
def _pool(processes: int, method: Literal["fork", "spawn"]) -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context(method)
    # Workers hold the reading end of a pipe, which ends when this process closes it or dies.
    reading, writing = context.Pipe(duplex=False)
    inherited = writing if method == "fork" else None
    pool = ProcessPoolExecutor(
        processes, context, initializer=_begin, initargs=(os.getpid(), reading, inherited)
    )
    try:
        yield pool
    except BaseException:
        writing.close()  # nobody waits for what is under way
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        reading.close()
        writing.close()


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Let a Ctrl-C come at the end: a pool that is half started cannot be shut down."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield  # another language handles it, or the main thread will
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _begin(parent: int, reading: Connection, inherited: Connection | None) -> None:
    # Ctrl-C reaches every process of a terminal; it is the parent's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if inherited is not None:
        inherited.close()
    threading.Thread(target=_leave_with, args=(parent, reading), daemon=True).start()


def _leave_with(parent: int, reading: Connection) -> None:
    with suppress(EOFError):
        reading.recv_bytes()
    # The work ends by itself, at its next read: a process that died while it sends a result would
    # leave its parent waiting for the rest of it.
    stopping.set()
    # A parent that was killed tells nobody, and waiting for its next job would take for ever.
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)
