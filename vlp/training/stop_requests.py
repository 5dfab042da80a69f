"""Requests that a run end: signals, and the end of the launcher."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from vlp import distributed
from vlp.signals import STOP_SIGNALS

# What `deepspeed` starts on each machine, to start the ranks.
_NODE = "deepspeed.launcher.launch"

_NAMES = {
    *("accelerate", "accelerate-launch", "accelerate.commands.launch"),
    *("deepspeed", "deepspeed.launcher.runner", _NODE),
    *("torchrun", "torch.distributed.run", "torch.distributed.launch"),
    *("vlp", "launch"),
}
# What torchrun and DeepSpeed set in every process they start.
_MARKS = "TORCHELASTIC_RUN_ID", "CROSS_SIZE"


class Launchers:
    """Processes from this one up to the outermost launcher, with shells between them."""

    # Shells above are left out, as a run may outlive a terminal. Without /proc no end is noticed.

    def __init__(self) -> None:
        ancestors = [os.getpid(), *_ancestors(os.getpid())]
        launchers = [
            index for index, process in enumerate(ancestors) if _program(process) in _NAMES
        ]
        # A launcher's name may be unknown.
        marked = any(mark in os.environ for mark in _MARKS)
        outer = launchers[-1] if launchers else int(marked)
        self._chain = ancestors[: outer + 1]
        # One may end before this process looks for it; init has then inherited what it started.
        started = _program(ancestors[outer]) == _NODE if launchers else marked
        inherited = _parent(ancestors[outer if launchers else 0]) == 1
        self._lost = started and inherited and _first_is_init()

    def lost(self) -> bool:
        """Return whether a launcher has ended."""
        if not self._lost:
            links = zip(self._chain, self._chain[1:], strict=False)
            self._lost = any(_parent(process) != parent for process, parent in links)
        return self._lost


def _ancestors(process: int) -> Iterator[int]:
    while (process := _parent(process)) > 0:
        yield process


def _parent(process: int) -> int:
    """Return the parent's id; 0 without one."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def _first_is_init() -> bool:
    """Return False in a container in which the first process may itself start ranks."""
    name = _program(1)
    return name not in _NAMES | {"sh", "bash", "dash"} and not name.endswith(".py")


def _program(process: int) -> str:
    """Return the name of the program, or of the script or module of Python, that runs."""
    try:
        line = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    name = Path(line[0]).name
    if name.startswith("python"):
        name = next((Path(word).name for word in line[1:] if word[:1] not in ("", "-")), name)
    return name


# Exit code of a run that was asked to stop and goes on with --resume: EX_TEMPFAIL of BSD.
REQUEUE = 75

# Seconds to reach the end of a step once asked; launchers kill after 30.
GRACE = 20.0

# Seconds to finish validating or saving once asked; a rank for which it waits may be gone.
PATIENCE = 240.0

# About how long ranks train between two checks of each other's stop signals.
SECONDS = 4.0

_POLL = 1.0
_wakes = False


def _reset_wakeup_fd() -> None:
    # A loader's process is not to wake the thread of the rank that it was forked from.
    if _wakes:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_reset_wakeup_fd)


class StopSignals:
    """Listener to SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, the first Ctrl-C and the end of a launcher.

    No signal kills; a SIGHUP ignored by nohup stays ignored. A second Ctrl-C interrupts; repeated
    SIGTERMs, as launchers send, change nothing. After a request, a process that does not check in
    time exits with `REQUEUE`: at once before its first check, later within `grace` seconds or twice
    its longest time between checks, or inside `suspend_deadline` within `patience` seconds.
    """

    def __init__(self, grace: float = GRACE, patience: float = PATIENCE) -> None:
        self.reason: str | None = None
        self._grace, self._patience = grace, patience
        self._before: dict[signal.Signals, Any] = {}
        self._last_check: float | None = None
        self._longest = 0.0
        self._request_time = self._deadline = float("inf")
        self._suspended = False
        self._over = threading.Event()

    def should_stop(self) -> bool:
        """Return whether the run is to end; called between steps."""
        now = time.monotonic()
        self._longest = max(self._longest, now - (self._last_check or now))
        self._last_check = now
        return self.reason is not None

    @contextmanager
    def suspend_deadline(self) -> Iterator[None]:
        """Suspend the grace while validating or saving; it restarts at the end."""
        if self._last_check is None:
            yield
            return
        start, self._suspended = time.monotonic(), True
        try:
            yield
        finally:
            now = time.monotonic()
            self._last_check += now - start
            if self.reason is not None:
                self._deadline = max(self._deadline, now + self._grace)
            self._suspended = False

    def disable_deadline(self) -> None:
        """Disable the deadline: the run has ended and is being saved."""
        self._over.set()

    def __enter__(self) -> StopSignals:
        global _wakes
        self._launchers = Launchers()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        _wakes = True
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        # The main thread may wait in a collective call for ranks that are gone, where it runs no
        # signal handler. This thread then ends a rank that does not finish its step.
        self._thread = threading.Thread(target=self._watch, name="stop", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        global _wakes
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        _wakes = False
        self._over.set()
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._request(signal.Signals(number).name)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _request(self, reason: str) -> None:
        if self.reason is None:
            grace = 0.0 if self._last_check is None else max(self._grace, 2 * self._longest)
            self._request_time = time.monotonic()
            self._deadline = self._request_time + grace
            self.reason = reason

    def _watch(self) -> None:
        # `select.select` takes no descriptor from 1024 on.
        poller = select.poll()
        poller.register(self._read, select.POLLIN)
        while not self._over.is_set():
            for number in os.read(self._read, 64) if poller.poll(1000 * _POLL) else b"":
                if number in STOP_SIGNALS:
                    self._request(signal.Signals(number).name)
            if self._launchers.lost():
                self._request("the end of its launcher")
            suspended = self._suspended
            limit = self._request_time + self._patience if suspended else self._deadline
            if time.monotonic() >= limit and not self._over.is_set():
                rank = os.environ.get("RANK", "0")
                when = "while it validated or saved" if suspended else "in the midst of a step"
                if self._last_check is None:
                    when = "before its first step"
                # Whoever read the messages may be gone, too.
                with suppress(OSError):
                    print(f"rank {rank} stopped by {self.reason} {when}", file=sys.stderr)
                leave(REQUEUE)


def leave(code: int) -> NoReturn:
    """End the process at once, without waiting for other ranks; what was printed is written."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


class StopConsensus:
    """Decision of all ranks to stop, at the same steps; a single rank decides at each."""

    def __init__(self, signals: StopSignals, device: torch.device) -> None:
        self._signals, self._device = signals, device
        self._steps, self._steps_left = 1, 0
        self._last_check = time.monotonic()

    def should_stop(self) -> bool:
        """Return, on every rank alike, whether the run is to end; called once before each step."""
        requested = self._signals.should_stop()
        if distributed.world_size() == 1:
            return requested
        if self._steps_left:
            self._steps_left -= 1
            return False
        # The first checks are one step apart; then the slowest rank's pace sets the steps in
        # `SECONDS`, growing at most twofold from one check to the next.
        now = time.monotonic()
        pace = (now - self._last_check) / self._steps
        stop, pace = distributed.max_over_ranks([float(requested), pace], self._device)
        self._last_check = time.monotonic()
        self._steps = max(1, min(2 * self._steps, int(SECONDS / max(pace, 1e-6))))
        self._steps_left = self._steps - 1
        return bool(stop)
