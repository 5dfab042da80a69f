"""Lock of a folder: one process at a time writes a run, shards, an index or features."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import IO, Any

from vlp.config import ConfigError
from vlp.io import open_nofollow, parse_json, require_local

PREFIX = ".lock-"
BEAT_SECONDS = 10.0  # between two touches of a lock file
STALE_SECONDS = 60.0  # without a touch, after which another machine's lock is void
# Wait for the worker processes of a killed command, which still hold its lock.
WAIT_SECONDS = 30.0


# Every machine has a lock file in the folder. Between processes of a machine `flock` decides, which
# ends with the process and its forks. Other machines may not see `flock` on a shared disk: for them
# a thread touches the file. A process writes its file before it looks for others, so that at most
# one of two processes that start at once continues.
class FolderLock(AbstractContextManager["FolderLock"]):
    """Exclusive right to write a folder: `with FolderLock(folder): ...`; ConfigError if taken.

    A missing folder is made, and removed with the lock if it is still empty. prefix: start of lock
    file names; locks with different prefixes are independent.
    """

    def __init__(self, folder: Path, prefix: str = PREFIX) -> None:
        self.folder, self._prefix = folder, prefix
        self._path = folder / f"{prefix}{_machine()}"
        self._is_new_folder = False
        self._released = threading.Event()
        self._file: IO[bytes] | None = None
        try:
            require_local(folder)
            self._is_new_folder = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._acquire()
            self._write_owner(self._file)
            for other in self._others():
                if _is_touched(other, self._path):
                    raise ConfigError(self._refusal(other))
                other.unlink(missing_ok=True)
        except OSError as error:
            self.release()
            raise ConfigError(f"{folder}: cannot be written ({error.strerror})") from error
        except BaseException:
            self.release()
            raise
        threading.Thread(target=self._beat, daemon=True).start()

    def release(self) -> None:
        """Release the lock."""
        self._released.set()
        with suppress(OSError):
            if self._file is not None:
                self._path.unlink(missing_ok=True)
                self._file.close()
                self._file = None
            if self._is_new_folder:
                self.folder.rmdir()  # fails if it is not empty

    def __exit__(self, *error: object) -> None:
        self.release()

    def _acquire(self) -> IO[bytes]:
        """Return the lock file, open and locked.

        Raises ConfigError at once if its owner runs. If only children of a killed owner still hold
        it, waits for them for up to `WAIT_SECONDS`.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            file = open(self._path, "a+b", opener=open_nofollow)  # noqa: SIM115
            try:
                flock(file, LOCK_EX | LOCK_NB)
                is_locked = False
            except BlockingIOError:
                is_locked = True
            except OSError:  # a file system without locks
                is_locked = _is_running(_owner(self._path))
            # The owner may have removed the file after it was opened: then open the new one.
            with suppress(FileNotFoundError):
                if not is_locked and os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                    return file
            file.close()
            if is_locked and (_is_running(_owner(self._path)) or time.monotonic() > deadline):
                raise ConfigError(self._refusal(self._path))
            time.sleep(0.05)

    def _write_owner(self, file: IO[bytes]) -> None:
        process = os.getpid()
        owner = {
            "host": socket.gethostname(),
            "process": process,
            "started": _start_time(process),
            "since": datetime.now(UTC).isoformat(" ", "seconds"),
        }
        file.truncate(0)
        file.write(json.dumps(owner).encode())
        file.flush()

    def _beat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            try:
                os.utime(self._path)
            except OSError as error:
                # After other errors the disk may answer at the next beat.
                if isinstance(error, FileNotFoundError) and any(self._others()):
                    print(f"error: {self.folder}: another machine has taken over", file=sys.stderr)
                    os._exit(1)

    def _others(self) -> list[Path]:
        return [path for path in self.folder.glob(f"{self._prefix}*") if path != self._path]

    def _refusal(self, path: Path) -> str:
        owner = {"process": "?", "host": "?", "since": "?"} | _owner(path)
        return (
            f"{self.folder}: is being written by process {owner['process']} on {owner['host']} "
            f"since {owner['since']}; wait for its end, or name another folder"
        )


def owner_of(folder: Path) -> str | None:
    """Return "process N on HOST" for the process that locks a folder; None if it is unlocked."""
    for path in folder.glob(f"{PREFIX}*"):
        owner = _owner(path)
        with suppress(OSError):
            is_here = path.name == f"{PREFIX}{_machine()}"
            is_recent = time.time() - path.stat().st_mtime < STALE_SECONDS
            if owner and (_is_running(owner) if is_here else is_recent):
                return f"process {owner.get('process')} on {owner.get('host')}"
    return None


def is_lock(path: Path) -> bool:
    """Return whether a file is the lock of its folder."""
    return path.name.startswith(PREFIX)


def _machine() -> str:
    """Return a name of the running kernel, as `flock` works between its processes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}-{boot.read_text()[:8] if boot.exists() else ''}"


def _owner(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        owner = parse_json(path.read_bytes())
        if isinstance(owner, dict):
            return owner
    return {}


def _is_running(owner: dict[str, Any]) -> bool:
    # A later process may have the owner's id, but not its start time.
    start_time = owner.get("started")
    return start_time is not None and _start_time(owner.get("process")) == start_time


def _start_time(process: object) -> int | None:
    """Return when a process started, in ticks since boot; None if it does not run."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else int(fields[19])
    return None


def _is_touched(other: Path, local: Path) -> bool:
    """Wait until another machine touches its lock file; return False if stale or removed."""
    with suppress(FileNotFoundError):  # removed by its owner
        first = _last_beat(other)
        deadline = time.monotonic() + STALE_SECONDS
        while time.monotonic() < deadline:
            os.utime(local)  # so that both times are of the disk's clock
            last = _last_beat(other)
            if last != first:
                return True
            if _last_beat(local) - last > STALE_SECONDS:
                return False
            time.sleep(BEAT_SECONDS / 20)
    return False


def _last_beat(path: Path) -> float:
    with open(path, "rb") as file:  # opening makes a network file system ask its server
        return os.fstat(file.fileno()).st_mtime
