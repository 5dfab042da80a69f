"""Requests to stop a run: signals, and the end of the launcher."""

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

# The process of `deepspeed` on each machine that starts the ranks.
_NODE_LAUNCHER = "deepspeed.launcher.launch"

_LAUNCHER_NAMES = {
    *("accelerate", "accelerate-launch", "accelerate.commands.launch"),
    *("deepspeed", "deepspeed.launcher.runner", _NODE_LAUNCHER),
    *("torchrun", "torch.distributed.run", "torch.distributed.launch"),
    *("vlp", "launch"),
}
# Environment variables that torchrun and DeepSpeed set in every process they start.
_LAUNCHER_VARIABLES = "TORCHELASTIC_RUN_ID", "CROSS_SIZE"


class Launchers:
    """Process ids from this process up to its outermost launcher, with shells between them."""

    # No shells above the launcher: a run may outlive a terminal. Without /proc no end is noticed.

    def __init__(self) -> None:
        lineage = [os.getpid()]
        while (parent := _parent(lineage[-1])) > 0:
            lineage.append(parent)
        launcher_indices = [
            index for index, pid in enumerate(lineage) if _program(pid) in _LAUNCHER_NAMES
        ]
        if launcher_indices:
            outermost = child_index = launcher_indices[-1]
            # `deepspeed` itself starts this one; others may be started by hand.
            has_launcher = _program(lineage[outermost]) == _NODE_LAUNCHER
        else:
            # With a launcher's variables but without a known name, the parent is the launcher.
            has_launcher = any(name in os.environ for name in _LAUNCHER_VARIABLES)
            outermost, child_index = int(has_launcher), 0
        self._lineage = lineage[: outermost + 1]
        # If the child's launcher has ended before this call, init has adopted the child.
        is_adopted = _parent(lineage[child_index]) == 1 and _has_init()
        self._is_lost = has_launcher and is_adopted

    def is_lost(self) -> bool:
        """Return whether a launcher has ended."""
        if not self._is_lost:
            links = zip(self._lineage, self._lineage[1:], strict=False)
            self._is_lost = any(_parent(pid) != parent for pid, parent in links)
        return self._is_lost


def _parent(pid: int) -> int:
    """Return the parent's id; 0 without one."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def _has_init() -> bool:
    """Return whether process 1 is an init and not a container's own launcher or script."""
    name = _program(1)
    return name not in _LAUNCHER_NAMES | {"sh", "bash", "dash"} and not name.endswith(".py")


def _program(pid: int) -> str:
    """Return the name of a process's program, or of Python's script or module; "" if unknown."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    name = Path(arguments[0]).name
    if name.startswith("python"):
        scripts = (Path(text).name for text in arguments[1:] if text[:1] not in ("", "-"))
        name = next(scripts, name)
    return name


# Exit code of a run that stopped on request and can be resumed: EX_TEMPFAIL of BSD.
REQUEUE = 75

# Seconds from a request to the end of the step; launchers kill after 30.
GRACE = 20.0

# Seconds from a request to the end of a validation or checkpoint, which may wait for a lost rank.
PATIENCE = 240.0

# Seconds of training between two checks of other ranks' requests, approximately.
CHECK_SECONDS = 4.0

_POLL_SECONDS = 1.0
_has_wakeup_fd = False


def _reset_wakeup_fd() -> None:
    # A signal to a forked loader process must not wake the thread of this rank.
    if _has_wakeup_fd:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_reset_wakeup_fd)


class StopSignals:
    """Requests to stop: SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, Ctrl-C, and the end of a launcher.

    A SIGHUP that nohup ignores stays ignored; a second Ctrl-C interrupts; further SIGTERMs, which
    launchers send, change nothing. A process that does not call `should_stop` in time after a
    request exits with `REQUEUE`: at once before the first call; later after `grace` seconds or
    twice the longest time between calls, whichever is longer; in `suspend_deadline` after
    `patience` seconds.
    """

    def __init__(self, grace: float = GRACE, patience: float = PATIENCE) -> None:
        self.reason: str | None = None
        self._grace, self._patience = grace, patience
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._last_check: float | None = None
        self._longest_step = 0.0
        self._request_time = self._deadline = float("inf")
        self._is_suspended = False
        self._over = threading.Event()

    def should_stop(self) -> bool:
        """Return whether the run is to end; called between steps."""
        now = time.monotonic()
        self._longest_step = max(self._longest_step, now - (self._last_check or now))
        self._last_check = now
        return self.reason is not None

    @contextmanager
    def suspend_deadline(self) -> Iterator[None]:
        """Replace `grace` by `patience` in this context, for validating or saving."""
        if self._last_check is None:
            yield
            return
        start, self._is_suspended = time.monotonic(), True
        try:
            yield
        finally:
            now = time.monotonic()
            self._last_check += now - start  # so that `_longest_step` leaves this time out
            if self.reason is not None:
                self._deadline = max(self._deadline, now + self._grace)
            self._is_suspended = False

    def disable_deadline(self) -> None:
        """Disable the deadline, as the run has ended and is being saved."""
        self._over.set()

    def __enter__(self) -> StopSignals:
        global _has_wakeup_fd
        self._launchers = Launchers()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        _has_wakeup_fd = True
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous_handlers[number] = signal.signal(number, self._handle)
        # While the main thread waits in a collective call, for ranks that may be lost, it runs no
        # signal handler: this thread notices signals, too, and exits after the deadline.
        self._thread = threading.Thread(target=self._watch, name="stop", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        global _has_wakeup_fd
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        _has_wakeup_fd = False
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
            grace = 0.0 if self._last_check is None else max(self._grace, 2 * self._longest_step)
            self._request_time = time.monotonic()
            self._deadline = self._request_time + grace
            self.reason = reason

    def _watch(self) -> None:
        # `select.select` fails for descriptors from 1024 on.
        poller = select.poll()
        poller.register(self._read, select.POLLIN)
        rank, is_announced = os.environ.get("RANK", "0"), False
        while not self._over.is_set():
            has_signal = poller.poll(1000 * _POLL_SECONDS)
            # Python writes a byte for each signal: its number.
            for number in os.read(self._read, 64) if has_signal else b"":
                if number in STOP_SIGNALS:
                    self._request(signal.Signals(number).name)
            if self._launchers.is_lost():
                self._request("the end of its launcher")
            is_suspended = self._is_suspended
            if is_suspended and self.reason is not None and not is_announced and rank == "0":
                is_announced = True
                text = f"{self.reason}: the run stops after this validation or checkpoint, in "
                text += f"{self._patience:.0f} s at most"
                if self.reason == "SIGINT":
                    text += "; a second Ctrl-C ends it unsaved"
                with suppress(OSError):
                    print(text, file=sys.stderr)
            limit = self._request_time + self._patience if is_suspended else self._deadline
            if time.monotonic() >= limit and not self._over.is_set():
                when = "while it validated or saved" if is_suspended else "in the midst of a step"
                if self._last_check is None:
                    when = "before its first step"
                # The reader of standard error may have ended, too.
                with suppress(OSError):
                    print(f"rank {rank} stopped by {self.reason} {when}", file=sys.stderr)
                leave(REQUEUE)


def leave(code: int) -> NoReturn:
    """End the process at once, without waiting for other ranks; flush its output first."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


class StopConsensus:
    """Common decision of all ranks whether to stop, every few steps: one request stops all."""

    def __init__(self, signals: StopSignals, device: torch.device) -> None:
        self._signals, self._device = signals, device
        self._steps, self._steps_left = 1, 0
        self._last_check = time.monotonic()

    def should_stop(self) -> bool:
        """Return the same decision on every rank; call it once before each step."""
        requested = self._signals.should_stop()
        if distributed.world_size() == 1:
            return requested
        if self._steps_left:
            self._steps_left -= 1
            return False
        # Steps between checks: as many as the slowest rank does in `CHECK_SECONDS`, but at most
        # twice as many as before the last check, from 1 on.
        now = time.monotonic()
        step_seconds = (now - self._last_check) / self._steps
        local = [float(requested), step_seconds]
        stop, step_seconds = distributed.max_over_ranks(local, self._device)
        self._last_check = time.monotonic()
        self._steps = max(1, min(2 * self._steps, int(CHECK_SECONDS / max(step_seconds, 1e-6))))
        self._steps_left = self._steps - 1
        return bool(stop)
