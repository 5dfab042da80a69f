"""Parallel jobs in local processes or on a Ray cluster, and a ledger of their results."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
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
from vlp.signals import end_with_parent

Job = TypeVar("Job")
Result = TypeVar("Result")
_JOBS_PER_WORKER = 4  # submitted, not yet yielded
_stopping: Any = threading.Event()  # the command was interrupted or has failed


class WorkStopped(Exception):
    """End of a job in a worker, after the command was interrupted or has failed."""


def raise_if_stopped() -> None:
    """Raise WorkStopped if the command was interrupted or has failed; long jobs call it often."""
    if _stopping.is_set():
        raise WorkStopped


class Executor:
    """Local processes, forked, or with `spawn` started as new interpreters (for torch)."""

    def __init__(self, processes: int, spawn: bool = False) -> None:
        if processes < 1:
            raise ConfigError(f"--processes {processes}: give at least 1")
        self._processes, self._spawn = processes, spawn

    def map(
        self,
        work: Callable[[Job], Result],
        jobs: Iterable[Job],
        *,
        ordered: bool = True,
        ledger: Path | None = None,
    ) -> Iterator[Result]:
        """Yield `work(job)` for each job, in order or as completed; `work` and jobs are picklable.

        Results in the folder `ledger` (see `open_ledger`) are not computed again.
        """
        return self._results(partial(_load_or_run, work, ledger) if ledger else work, jobs, ordered)

    def _results(
        self, work: Callable[[Job], Result], jobs: Iterable[Job], ordered: bool
    ) -> Iterator[Result]:
        remaining = iter(jobs)
        first = list(islice(remaining, self._processes))
        all_jobs = chain(first, remaining)
        # A single job runs in this process, unless it needs a new interpreter.
        if len(first) < (1 if self._spawn else 2):
            yield from map(work, all_jobs)
            return
        context = multiprocessing.get_context("spawn" if self._spawn else "fork")
        stop = context.Event()
        pool = ProcessPoolExecutor(len(first), context, _init_worker, (os.getpid(), stop))

        def submit(job: Job) -> Future[Result]:
            # The first call starts the pool, which cannot be shut down if interrupted half-way.
            with _defer_sigint():
                return pool.submit(work, job)

        try:
            yield from _submit_all(submit, all_jobs, len(first), ordered, (BrokenProcessPool,))
        except BaseException:
            stop.set()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class RayExecutor(Executor):
    """A Ray cluster: `address`, else RAY_ADDRESS, else a local one; lost tasks are retried."""

    def __init__(self, address: str | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("--executor ray needs Ray: pip install 'vlp[ray]'") from error
        self._ray: Any = ray
        if ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Workers find the same modules as this process, from a checkout too.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {"env_vars": {"PYTHONPATH": paths}}
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        try:
            ray.init(address, runtime_env=environment, **quiet)
        except Exception as error:  # Ray raises many classes for a cluster out of reach
            raise ConfigError(f"--executor {address or 'ray'}: no cluster ({error})") from error

    def _results(
        self, work: Callable[[Job], Result], jobs: Iterable[Job], ordered: bool
    ) -> Iterator[Result]:
        ray, tasks = self._ray, {}
        work_reference = ray.put(work)

        @ray.remote(num_cpus=1, max_retries=3)
        def call(work: Callable[[Job], Result], job: Job) -> Result:
            return work(job)

        def submit(job: Job) -> Future[Result]:
            task = call.remote(work_reference, job)
            future: Future[Result] = task.future()
            tasks[future] = task
            future.add_done_callback(lambda done: tasks.pop(done, None))
            return future

        cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
        crashes = (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError)
        try:
            yield from _submit_all(submit, jobs, cores, ordered, crashes)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        finally:
            for task in list(tasks.values()):
                ray.cancel(task)


@contextmanager
def open_ledger(folder: Path) -> Iterator[Path]:
    """Create and yield a folder for results of finished jobs; delete it if the block succeeds."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror})") from error
    # Unpickling another user's file would run its code.
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder}: belongs to another user; delete it")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _load_or_run(work: Callable[[Job], Result], ledger: Path, job: Job) -> Result:
    """Return a job's result from the ledger, else run the job and store its result."""
    digest = blake2b(pickle.dumps((__version__, work, job)), digest_size=16)
    # A changed file is another job.
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


def _submit_all(
    submit: Callable[[Job], Future[Result]],
    jobs: Iterable[Job],
    workers: int,
    ordered: bool,
    crashes: tuple[type[BaseException], ...],
) -> Iterator[Result]:
    """Submit jobs, a few ahead, and yield their results; `crashes` become a ConfigError."""
    remaining = iter(jobs)
    pending: dict[Future[Result], Job] = {}
    try:
        while True:
            # Only a few, as ordered results wait in memory for slower jobs before them.
            for job in islice(remaining, _JOBS_PER_WORKER * workers - len(pending)):
                pending[submit(job)] = job
            if not pending:
                return
            future = next(iter(pending))
            if not ordered:
                future = next(iter(wait(pending, return_when=FIRST_COMPLETED).done))
            yield future.result()
            del pending[future]
    except crashes as error:
        label = shorten(str(next(iter(pending.values()), "its start")), 200)
        raise ConfigError(
            f"a process died at {label}, or soon after it: out of memory, or a crash in a decoder? "
            "Finished shards stay; run the same command again to go on, perhaps with fewer "
            "--processes; --executor local --processes 1 shows where"
        ) from error


@contextmanager
def _defer_sigint() -> Iterator[None]:
    # A mask would hold for this thread alone: another one would receive the signal.
    handler = signal.getsignal(signal.SIGINT)
    # None: the handler is not Python's. Only the main thread receives and sets signals.
    if handler is None or threading.current_thread() is not threading.main_thread():
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


def _init_worker(parent: int, stop: Any) -> None:
    global _stopping
    _stopping = stop
    # The terminal sends Ctrl-C to all processes; the parent alone handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL, parent)
