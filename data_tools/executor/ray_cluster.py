"""Tasks on a Ray cluster (`pip install vlp[ray]`), whose machines share the file system.

A task that a lost machine took along is done again on another one.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from data_tools.executor.executor import Executor, Job, Result, in_flight
from vlp.config import ConfigError

RETRIES = 3
"""Times that a task is tried again whose worker or machine died."""


class RayExecutor(Executor):
    """A Ray cluster: the one at `ray://HOST:PORT`, of RAY_ADDRESS, or of this machine.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers at the address.
    """

    def __init__(self, address: str | None = None, processes: int | None = None) -> None:
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
        options: dict[str, Any] = {
            "runtime_env": {"env_vars": {"PYTHONPATH": paths}},
            "logging_level": logging.ERROR,
            "log_to_driver": False,
        }
        try:
            try:
                ray.init(address or "auto", **options)
            except ConnectionError:
                if address is not None or "RAY_ADDRESS" in os.environ:
                    raise
                ray.init(num_cpus=processes, include_dashboard=False, **options)
        except Exception as error:  # a cluster can be out of reach in many ways
            raise ConfigError(f"--executor {address or 'ray'}: no cluster ({error})") from error

    def results(
        self, work: Callable[[Job], Result], jobs: Iterable[Job], ordered: bool
    ) -> Iterator[Result]:
        """Yield results; a task whose machine dies is tried again elsewhere."""
        ray = self._ray
        call = ray.remote(num_cpus=1, max_retries=RETRIES)(_call)
        shared = ray.put(work)
        open_tasks: dict[Future[Result], Any] = {}

        def submit(job: Job) -> Future[Result]:
            task = call.remote(shared, job)
            future: Future[Result] = task.future()
            open_tasks[future] = task
            future.add_done_callback(lambda done: open_tasks.pop(done, None))
            return future

        cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
        lost = (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError)
        try:
            yield from in_flight(submit, jobs, cores, ordered, lost)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        finally:
            for task in list(open_tasks.values()):
                ray.cancel(task)


def _call(work: Callable[[Job], Result], job: Job) -> Result:
    return work(job)
