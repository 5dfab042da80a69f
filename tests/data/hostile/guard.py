"""A watch over code that reads a hostile file: time, memory, what it writes, whom it asks."""

import faulthandler
import os
import resource
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

SECONDS = 20
MEMORY = 2**30 + 2**29
"""Bytes of address space beyond what the process has; more cannot be had."""

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = (
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.symlink",
    "os.link",
    "os.truncate",
)
_ANYWHERE = ("/dev/null",)


class _Watch:
    """State of the audit hook, which stays for as long as the process lives."""

    def __init__(self):
        self.folder = None
        self.seen = []

    def hook(self, event, arguments):
        if self.folder is None:
            return
        if event in ("socket.connect", "socket.getaddrinfo"):
            self.seen.append(f"{event} {arguments[1:]}")
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
            self._place(event, arguments[0])
        elif event in _CHANGES:
            # shutil.rmtree names files in the folder that it has opened.
            number = arguments[-1]
            opened = f"/proc/self/fd/{number}" if isinstance(number, int) and number >= 0 else ""
            for place in arguments[:2]:
                if isinstance(place, str | bytes | os.PathLike):
                    self._place(event, os.path.join(opened, os.fsdecode(place)))

    def _place(self, event, place):
        assert self.folder is not None
        if not isinstance(place, str | bytes | os.PathLike):
            return
        path = os.path.realpath(os.fsdecode(place))
        if not f"{path}/".startswith(self.folder) and path not in _ANYWHERE:
            self.seen.append(f"{event} {path}")


_WATCH = _Watch()
sys.addaudithook(_WATCH.hook)


class Hang(BaseException):
    """Code that went on for too long."""


@contextmanager
def guarded(folder):
    """Run code that may write below a folder alone; yields what else it did, raises Hang."""

    def late(*_):
        raise Hang(f"more than {SECONDS} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    faulthandler.dump_traceback_later(3 * SECONDS, exit=True)
    _WATCH.folder, _WATCH.seen = os.path.realpath(folder) + os.sep, []
    try:
        yield _WATCH.seen
    finally:
        _WATCH.folder = None
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()
