"""Jobs of the data tools in local processes or on a Ray cluster, and a ledger of results."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

from vlp import __version__
from vlp.config import ConfigError
from vlp.io import atomic_write

Job = TypeVar("Job")
Result = TypeVar("Result")
# Jobs submitted for each worker.
_IN_FLIGHT = 4
# Set where the command was interrupted or has failed.
_stopping: Any = threading.Event()


class WorkStopped(Exception):
    """Work that nobody waits for any more."""


def go_on() -> None:
    """Raise WorkStopped if the command was interrupted or has failed; all work calls it."""
    if _stopping.is_set():
        raise WorkStopped


class Executor:
    """Local processes, or this one if one is enough; `fresh` spawns them (threads of torch)."""

    def __init__(self, processes: int = os.cpu_count() or 1, fresh: bool = False) -> None:
        if processes < 1:
            raise ConfigError(f"--processes is {processes}, at least 1")
        self._processes, self._fresh = processes, fresh

    def map(
        self,
        work: Callable[[Job], Result],
        jobs: Iterable[Job],
        *,
        ordered: bool = True,
        ledger: Path | None = None,
    ) -> Iterator[Result]:
        """Yield `work(job)` for each job, in order or as ready; `work` and jobs are picklable.

        Results in the `ledger` are not computed again.
        """
        return self._results(partial(_do_once, work, ledger) if ledger else work, jobs, ordered)

    def _results(
        self, work: Callable[[Job], Result], jobs: Iterable[Job], ordered: bool
    ) -> Iterator[Result]:
        rest = iter(jobs)
        first = list(islice(rest, self._processes))
        rest = chain(first, rest)
        if len(first) < (1 if self._fresh else 2):
            yield from map(work, rest)
            return
        context = multiprocessing.get_context("spawn" if self._fresh else "fork")
        stop = context.Event()
        pool = ProcessPoolExecutor(len(first), context, _begin, (os.getpid(), stop))

        def submit(job: Job) -> Future[Result]:
            # The first one starts processes and a thread.
            with _ctrl_c_waits():
                return pool.submit(work, job)

        try:
            yield from _in_flight(submit, rest, len(first), ordered, (BrokenProcessPool,))
        except BaseException:
            stop.set()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class RayExecutor(Executor):
    """A Ray cluster at `ray://HOST:PORT`, of RAY_ADDRESS, or local; three retries of lost tasks."""

    def __init__(self, address: str | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("--executor ray wants Ray: pip install 'vlp[ray]'") from error
        self._ray: Any = ray
        if ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Workers find the same modules as this process, from a checkout too.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {"env_vars": {"PYTHONPATH": paths}}
        quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
        try:
            ray.init(address, runtime_env=environment, **quiet)
        # A cluster can be out of reach in many ways.
        except Exception as error:
            raise ConfigError(f"--executor {address or 'ray'}: no cluster ({error})") from error

    def _results(
        self, work: Callable[[Job], Result], jobs: Iterable[Job], ordered: bool
    ) -> Iterator[Result]:
        ray, tasks = self._ray, {}
        shared = ray.put(work)

        @ray.remote(num_cpus=1, max_retries=3)
        def call(work: Callable[[Job], Result], job: Job) -> Result:
            return work(job)

        def submit(job: Job) -> Future[Result]:
            task = call.remote(shared, job)
            future: Future[Result] = task.future()
            tasks[future] = task
            future.add_done_callback(lambda done: tasks.pop(done, None))
            return future

        cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
        lost = (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError)
        try:
            yield from _in_flight(submit, jobs, cores, ordered, lost)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        finally:
            for task in list(tasks.values()):
                ray.cancel(task)


@contextmanager
def open_ledger(folder: Path) -> Iterator[Path]:
    """Keep the results of finished jobs in a folder until the command has ended well."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror})") from error
    # Opening a pickle of another user would run its code.
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder}: belongs to another user; delete it")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _do_once(work: Callable[[Job], Result], ledger: Path, job: Job) -> Result:
    digest = blake2b(pickle.dumps((__version__, work, job)), digest_size=16)
    path = job if isinstance(job, Path) else getattr(job, "path", None)
    if path is not None and path.is_file():
        digest.update(repr((path.stat().st_size, path.stat().st_mtime_ns)).encode())
    cache = ledger / f"{digest.hexdigest()}.pickle"
    if cache.is_file():
        cached: Result = pickle.loads(cache.read_bytes())
        return cached
    result = work(job)
    with atomic_write(cache, suffix=f".{os.getpid()}.tmp", error=ConfigError) as file:
        pickle.dump(result, file, pickle.HIGHEST_PROTOCOL)
    return result


def _in_flight(
    submit: Callable[[Job], Future[Result]],
    jobs: Iterable[Job],
    workers: int,
    ordered: bool,
    lost: tuple[type[BaseException], ...],
) -> Iterator[Result]:
    rest = iter(jobs)
    waiting: dict[Future[Result], Job] = {}
    try:
        while True:
            # A few ahead: jobs hold paths, but results wait for the slowest before them.
            for job in islice(rest, _IN_FLIGHT * workers - len(waiting)):
                waiting[submit(job)] = job
            if not waiting:
                return
            ready = next(iter(waiting))
            if not ordered:
                ready = next(iter(wait(waiting, return_when=FIRST_COMPLETED).done))
            yield ready.result()
            del waiting[ready]
    except lost as error:
        label = shorten(str(next(iter(waiting.values()), "its start")), 200)
        raise ConfigError(
            f"a process died at {label}, or soon after it: out of memory, or a crash in a decoder? "
            "Finished shards stay; run the same command again to go on, perhaps with fewer "
            "--processes; --executor local --processes 1 shows where"
        ) from error


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    # A pool that is half started cannot be shut down.
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or threading.current_thread() is not threading.main_thread():
        # Another language handles it, or the main thread will.
        yield
        return
    signals: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: signals.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if signals:
            signal.raise_signal(signal.SIGINT)


def _begin(parent: int, stop: Any) -> None:
    # Ctrl-C is the parent's to handle.
    global _stopping
    _stopping = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def leave() -> None:
        # A killed parent tells nobody, and no worker may outlive it.
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()
