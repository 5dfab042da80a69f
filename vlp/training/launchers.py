"""The launchers that started this process, and whether they are still there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_NODE = "deepspeed.launcher.launch"
"""What `deepspeed` starts on each machine, to start the ranks."""

_NAMES = {
    *("accelerate", "accelerate-launch", "accelerate.commands.launch"),
    *("deepspeed", "deepspeed.launcher.runner", _NODE),
    *("torchrun", "torch.distributed.run", "torch.distributed.launch"),
    *("vlp", "launch"),
}
# What torchrun and DeepSpeed set in every process they start.
_MARKS = "TORCHELASTIC_RUN_ID", "CROSS_SIZE"


class Launchers:
    """The processes from this one up to the outermost launcher.

    Shells between them belong to the chain, shells above do not: a run may outlive a terminal.
    Only Linux tells (/proc); elsewhere no launcher is ever lost.
    """

    def __init__(self) -> None:
        above = [os.getpid(), *_ancestors(os.getpid())]
        known = [place for place, process in enumerate(above) if _program(process) in _NAMES]
        marked = any(mark in os.environ for mark in _MARKS)  # a launcher's name may be unknown
        outer = known[-1] if known else int(marked)
        self._chain = above[: outer + 1]
        # One may end before this process looks for it; init has then inherited what it started.
        started = _program(above[outer]) == _NODE if known else marked
        inherited = _parent(above[outer if known else 0]) == 1
        self._lost = started and inherited and _first_is_init()

    def lost(self) -> bool:
        """Return whether one of them has ended."""
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
    """Return False in a container whose first process may itself start ranks."""
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
