"""Jobs of Slurm arrays, in a module that tasks open quickly."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from vlp.config import ConfigError


def die(job: Path) -> str:
    """End the task's process before its result, as often as the file says."""
    count = int(job.read_text())
    job.write_text(str(count - 1))
    if count > 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return job.name


def fail(job: int) -> int:
    if job == 1:
        raise ConfigError("one")
    return job


def hang(job: Path) -> None:
    job.write_text(str(os.getpid()))
    time.sleep(600)
