"""Signals that end a process: what asks a run to end, and the death of a parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# Signals by which a scheduler, a launcher or a terminal asks a run to end. Slurm sends USR1 and
# USR2 where `sbatch --signal` says so, a terminal that is closed HUP.
STOP_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2

_PARENT_DEATH_SIGNAL = 1


def end_with_parent(number: signal.Signals, parent: int) -> None:
    """Have Linux send this process signal `number` when the process `parent` ends."""
    # An orphan would keep inherited locks, ports and memory.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, number)
        # The parent may have ended before the call.
        if os.getppid() != parent:
            os.kill(os.getpid(), number)
