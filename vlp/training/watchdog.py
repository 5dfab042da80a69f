"""Watchdog: reports silent or blocking ranks, and writes the stacks of all ranks."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vlp import distributed
from vlp.io import write_text

# Phases that may take any time.
_UNLIMITED = "start", "save", "validate", "end"
# A rank hangs in another phase after this multiple of the phase's longest time so far.
_HANG_FACTOR = 3.0


class Heartbeat(NamedTuple):
    """State of a rank, which it sends to the watching ranks.

    Attributes:
        number: count of the rank's heartbeats up to this one.
        host: name of the machine.
        step: optimiser steps done.
        phase_count: phases so far, equal on all ranks at the same point of the loop.
        phase, seconds: the current phase and its time so far.
        is_hanging: whether `seconds` is too long.
        is_waiting: whether the rank is in a collective call.
    """

    number: int
    host: str
    step: int
    phase_count: int
    phase: str
    seconds: float
    is_hanging: bool
    is_waiting: bool


class HangDetector:
    """Detector of ranks without a new heartbeat for `timeout` seconds, and of hanging steps."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        # By rank: number of the last heartbeat, and when it arrived.
        self._last: dict[int, tuple[int, float]] = {}
        # By rank reported as silent: when its last heartbeat arrived.
        self._silent: dict[int, float] = {}
        self._reported_phase_count: int | None = None

    def update(self, heartbeats: Sequence[Heartbeat], now: float) -> tuple[list[str], bool]:
        """Return messages at `now` (seconds), and whether they report a new hang.

        heartbeats: the last one of each watched rank, from rank 0 on; empty until these ranks have
            started.
        """
        messages, is_new = [], False
        for rank, heartbeat in enumerate(heartbeats):
            last_number, since = self._last.get(rank, (None, now))
            name = f"rank {rank} ({heartbeat.host})"
            if last_number != heartbeat.number:
                self._last[rank] = heartbeat.number, now
                if rank in self._silent:
                    silence = now - self._silent.pop(rank)
                    messages.append(f"{name} is back after {silence:.0f} s")
            elif rank in self._silent or heartbeat.phase == "end":
                continue
            elif now - since > self._timeout:
                self._silent[rank], is_new = since, True
                messages.append(
                    f"{name} is silent for {now - since:.0f} s; it was in step "
                    f"{heartbeat.step + 1}, {heartbeat.phase}"
                )
        if self._silent or not heartbeats or not all(h.is_hanging for h in heartbeats):
            return messages, is_new
        slowest = min(heartbeats, key=lambda heartbeat: heartbeat.phase_count)
        if slowest.phase_count == self._reported_phase_count:
            return messages, is_new
        self._reported_phase_count = slowest.phase_count
        # All ranks wait for the ranks that are behind, or among these for a rank that computes.
        behind = {r: h for r, h in enumerate(heartbeats) if h.phase_count == slowest.phase_count}
        blocking_ranks = {rank: h for rank, h in behind.items() if not h.is_waiting} or behind
        names = ", ".join(f"{rank} ({h.host})" for rank, h in blocking_ranks.items())
        others = "; the others wait" if len(blocking_ranks) < len(heartbeats) else ""
        message = f"step {slowest.step + 1} hangs for {slowest.seconds:.0f} s: rank {names}"
        return [*messages, f"{message} in {slowest.phase}{others}"], True


class Watchdog:
    """Thread that sends a rank's heartbeats; rank 0 watches all ranks, and rank 1 watches rank 0.

    On a hang rank 0 collects the stacks of all ranks that answer, with their last collective calls,
    in `step_N` of `folder`.

    Args:
        timeout: seconds without a heartbeat, or in one phase, after which a rank is reported.
        report: prints rank 0's messages; other ranks print theirs to standard error.
    """

    def __init__(self, timeout: float, report: Callable[[str], None], folder: Path) -> None:
        self.step = 0
        self._timeout, self._folder, self._hang_folder = timeout, folder, folder
        self._rank, self._ranks = distributed.rank(), distributed.world_size()
        self._report = report if self._rank == 0 else lambda text: print(text, file=sys.stderr)
        self._phase, self._phase_count, self._phase_start = "start", 0, time.perf_counter()
        self._longest: dict[str, float] = {}  # time by phase
        self._over = threading.Event()
        self._requests = 0  # requests for stacks so far, one for each hang
        self._missing_ranks = set[int]()  # ranks whose stacks have not arrived

    def enter(self, phase: str) -> None:
        """Record that this rank enters a phase, such as data, forward, update or save."""
        now = time.perf_counter()
        seconds = now - self._phase_start
        self._longest[self._phase] = max(self._longest.get(self._phase, 0.0), seconds)
        self._phase, self._phase_start = phase, now
        self._phase_count += 1

    def __enter__(self) -> Watchdog:
        # Heartbeats go through the process group's store, also during collective calls.
        store = distributed.clone_store()
        self._thread = threading.Thread(None, self._run, "watchdog", (store,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._phase = "end"
        self._over.set()
        self._thread.join(timeout=1.0)  # it may wait for a store that is gone

    def _run(self, store: Any) -> None:
        detector, number, is_over = HangDetector(self._timeout), 0, False
        while not is_over:
            is_over, number = self._over.is_set(), number + 1
            try:
                heartbeats = self._exchange(store, number)
                messages, is_new = detector.update(heartbeats, time.monotonic())
                for message in messages:
                    self._report(message)
                if self._rank == 0:
                    self._collect_stacks(store, is_new)
            except RuntimeError:  # the store is gone, and so is rank 0 or its launcher
                return
            self._over.wait(self._timeout / 6)

    def _exchange(self, store: Any, number: int) -> list[Heartbeat]:
        """Send a heartbeat, and stacks on request; return the heartbeats of watched ranks."""
        seconds = time.perf_counter() - self._phase_start
        limit = max(self._timeout, _HANG_FACTOR * self._longest.get(self._phase, 0.0))
        heartbeat = Heartbeat(
            number=number,
            host=socket.gethostname(),
            step=self.step,
            phase_count=self._phase_count,
            phase=self._phase,
            seconds=seconds,
            is_hanging=self._phase not in _UNLIMITED and seconds > limit,
            is_waiting=distributed.in_collective(),
        )
        if store is None:
            return [heartbeat]
        # A stopped store never answers, and calls to it have no timeout: rank 1 reports it.
        message = f"the store at rank 0 or its launcher is silent for {self._timeout:g} s"
        alarm = threading.Timer(self._timeout, self._report, [message])
        if self._rank == 1:
            alarm.start()
        try:
            store.set(f"heartbeat/{self._rank}", json.dumps(heartbeat))
            if self._rank > 0 and store.check([f"request/{self._requests + 1}"]):
                self._requests += 1
                store.set(f"stacks/{self._requests}/{self._rank}", stacks())
            # Rank 0 watches all ranks, rank 1 watches rank 0, others watch none.
            num_watched = {0: self._ranks, 1: 1}.get(self._rank, 0)
            keys = [f"heartbeat/{rank}" for rank in range(num_watched)]
            if not keys or not store.check(keys):  # not all watched ranks have started
                return []
            return [Heartbeat(*json.loads(text)) for text in store.multi_get(keys)]
        finally:
            alarm.cancel()

    def _collect_stacks(self, store: Any, is_new: bool) -> None:
        """For a new hang, request the stacks of all ranks; write the stacks that have arrived."""
        if is_new:
            self._requests, self._missing_ranks = self._requests + 1, set(range(1, self._ranks))
            self._hang_folder = self._folder / f"step_{self.step}"
            self._hang_folder.mkdir(parents=True, exist_ok=True)
            write_text(self._hang_folder / "rank_0.txt", stacks())
            if store is not None:
                store.set(f"request/{self._requests}", "")
            self._report(f"stacks and last collective calls of each rank: {self._hang_folder}")
        for rank in sorted(self._missing_ranks):
            if store.check([key := f"stacks/{self._requests}/{rank}"]):
                write_text(self._hang_folder / f"rank_{rank}.txt", store.get(key).decode())
                self._missing_ranks.remove(rank)


def stacks() -> str:
    """Return the stacks of this process's threads, and its last collective calls."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(number, number)}\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    ]
    if distributed.is_distributed():
        parts.append("last collective calls\n" + "\n".join(distributed.last_calls(32)))
    return "\n".join(parts) + "\n"
