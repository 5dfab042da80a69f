"""Sides of a benchmark that take turns, each with loader processes that rest meanwhile."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from evaluation.benchmarks import harness


class Turn(NamedTuple):
    """Some batches in a row: seconds of the clock, and CPU seconds of all processes."""

    seconds: float
    cpu: float


class Stream:
    """One side, whose loader processes run in its own turns alone.

    Args:
        start: makes the endless iterator of batches.
    """

    def __init__(self, start: Callable[[], Iterator[Any]]) -> None:
        others = set(multiprocessing.active_children())
        started = time.perf_counter()
        self._batches = start()
        next(self._batches)
        self.startup = time.perf_counter() - started
        """Seconds to the first batch."""
        self._workers = set(multiprocessing.active_children()) - others
        self._signal(signal.SIGSTOP)

    def turn(self, batches: int) -> Turn:
        """Receive some batches."""
        self._signal(signal.SIGCONT)
        started, cpu = time.perf_counter(), self._cpu()
        for _ in range(batches):
            next(self._batches)
        turn = Turn(time.perf_counter() - started, self._cpu() - cpu)
        self._signal(signal.SIGSTOP)
        return turn

    def close(self) -> None:
        """End the loader processes."""
        self._signal(signal.SIGCONT)
        self._batches.close()  # type: ignore[attr-defined]  # both are generators
        del self._batches
        gc.collect()  # open_clip's processes end with the last reference to their loader
        for worker in self._workers:
            worker.join(timeout=10)

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers:
            os.kill(worker.pid, number)  # type: ignore[arg-type]  # it was started

    def _cpu(self) -> float:
        used = time.process_time()
        for worker in self._workers:
            # After the name in brackets: state, ..., user and system time as numbers 14 and 15.
            fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
            used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return used


class LoaderTurns(NamedTuple):
    """One side: samples of a turn, its start-up in seconds, and its turns."""

    samples: int
    startup: float
    turns: list[Turn]

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / statistics.median(turn.seconds for turn in self.turns)


def take_turns(
    sides: Mapping[str, Callable[[], Iterator[Any]]],
    batches: int,
    samples: int,
    rounds: int,
    cores: int,
) -> dict[str, LoaderTurns]:
    """Start every side and let them receive batches in turn, the first round uncounted.

    Args:
        sides: what starts each one's endless batches.
        batches: of a turn.
        samples: in so many batches.
        rounds: timed turns of each side.
        cores: that all of them share; each process computes in one thread.
    """
    all_cores = sorted(os.sched_getaffinity(0))
    threads = torch.get_num_threads()
    os.sched_setaffinity(0, all_cores[:cores])
    torch.set_num_threads(1)
    streams: dict[str, Stream] = {}
    try:
        for name, start in sides.items():
            streams[name] = Stream(start)
        turns = {name: partial(stream.turn, batches) for name, stream in streams.items()}
        taken = harness.interleave(turns, rounds, warm_up=1)
    finally:
        for stream in streams.values():
            stream.close()
        os.sched_setaffinity(0, all_cores)
        torch.set_num_threads(threads)
    return {name: LoaderTurns(samples, streams[name].startup, taken[name]) for name in streams}
