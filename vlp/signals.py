"""Signals that stop a run, and the signal that a process gets when its parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# Signals by which a scheduler, a launcher or a terminal stops a run: Slurm sends USR1 or USR2 by
# `sbatch --signal`, a closed terminal HUP.
STOP_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2

_PARENT_DEATH_SIGNAL = 1


def end_with_parent(number: signal.Signals, parent: int) -> None:
    """Let Linux send this process the signal `number` when its parent, process `parent`, ends."""
    # An orphan would keep inherited locks, ports and memory.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, number)
        # The parent may have ended before the call.
        if os.getppid() != parent:
            os.kill(os.getpid(), number)
