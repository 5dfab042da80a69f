"""Processes that read for a DataLoader: they end with their work, and with the main process."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from vlp.data.shards import outages
from vlp.signals import STOPS, end_with_parent


def worker_settings(workers: int, prefetch: int) -> dict[str, Any]:
    """Return arguments of a DataLoader whose workers leave signals to the main process.

    Args:
        workers: processes; 0 reads in the main one.
        prefetch: batches that each of them has ready or in work.
    """
    if not workers:
        return {"num_workers": 0}
    return {
        "num_workers": workers,
        "prefetch_factor": prefetch,
        "worker_init_fn": partial(_prepare_worker, os.getpid(), outages.retries()),
    }


@contextmanager
def running(loader: DataLoader[Any]) -> Iterator[Iterator[Any]]:
    """Give the batches of a loader with `worker_settings`; its workers end with the context."""
    batches = iter(loader)
    # A generator that is never closed, as after an exception, must not leave workers behind.
    stop = getattr(batches, "_shutdown_workers", None)
    if stop is not None:
        atexit.register(stop)
    for worker in getattr(batches, "_workers", ()):
        # PyTorch terminates one that does not end, as in an outage; it ignores SIGTERM.
        worker.terminate = worker.kill
    try:
        yield batches
    finally:
        if stop is not None:
            atexit.unregister(stop)
            stop()


def _prepare_worker(parent: int, retries: Any, number: int) -> None:
    outages.share_retries(retries)
    # Ctrl-C and a scheduler's SIGTERM reach every process of the job. The main process answers them
    # (it writes a checkpoint); workers end when it stops or closes them, and with it: they inherit
    # the lock of the run's folder, which must not outlive it.
    for asked in STOPS:
        signal.signal(asked, signal.SIG_IGN)
    if os.getppid() == parent:
        end_with_parent(signal.SIGKILL, parent)
    else:  # a fork server's, which itself stays as long as it has workers
        threading.Thread(target=_end_with_main_process, daemon=True).start()


def _end_with_main_process() -> None:
    main_process = multiprocessing.parent_process()
    if main_process is not None:
        main_process.join()
        os.kill(os.getpid(), signal.SIGKILL)
