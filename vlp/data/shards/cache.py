"""Shards of a URL on a local disk: fetched whole, by one process for all, up to a size in bytes.

Any number of processes share one folder without a server. A file appears under its name only when
it is whole and checked, so none ever sees a half-written one. All locks are the kernel's own
(`flock`): they end with the process that holds them, whatever ends it. Who reads a file holds a
shared lock on it, and only a file without one is ever removed. A list of what was fetched tells the
cache's files from others that lie in its folder: those are neither counted nor removed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, NoReturn

from vlp.config import ConfigError
from vlp.data.shards.bad_samples import DataError
from vlp.data.shards.outages import Unreachable, given_up, patiently
from vlp.data.shards.remote import RemoteFolder
from vlp.data.shards.sample_files import BadSample
from vlp.io import parse_json, sha256_of, sync_path, unfollowed, write_text

_PART = ".part"
_FETCHED = "fetched.json"
_PATH = re.compile(r"[0-9a-f]{16}/[^/]+\.(?:[0-9a-f]{16}|unknown)\.(\d+)")
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW

# A shard that could not be had is not tried again for so long: it holds a thousand samples.
_FAILURE_SECONDS = 600

# Files that a process fetches at a time ahead of its reading; with one, reading that has caught up
# would wait for each file in turn while nothing else is fetched.
FETCHED_AHEAD = 2

# How long a full cache is waited for: other processes may be done with a shard.
_FULL_SECONDS = 30.0

_DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class CachedFile(NamedTuple):
    """A file of a remote folder: its name, length in bytes and, where known, SHA-256."""

    folder: RemoteFolder
    name: str
    bytes: int
    sha256: str | None = None

    @property
    def path(self) -> str:
        """Return its path in the cache; another content of that name has another path."""
        source = hashlib.blake2b(self.folder.url.encode(), digest_size=8).hexdigest()
        return f"{source}/{self.name}.{(self.sha256 or 'unknown')[:16]}.{self.bytes}"


class _Failure(NamedTuple):
    until: float
    bad: BadSample
    may_pass: bool


class _Full(Exception):
    """Nothing can be removed to make room."""


class ShardCache:
    """A folder of fetched files, the ones unused for longest removed first.

    Safe to hand to forked or spawned processes.

    Args:
        folder: on a local disk; made, for this user alone, when it is not there.
        limit: bytes of all files in it, those being fetched included.

    Raises:
        ConfigError: the folder cannot be made, or others may change what lies in it.
    """

    def __init__(self, folder: str | Path, limit: int) -> None:
        self.folder, self.limit = Path(folder), limit
        self._release: list[Callable[[], object]] = []
        self._failures: dict[str, _Failure] = {}
        self._background: tuple[int, SimpleQueue[CachedFile]] | None = None
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(0o700, exist_ok=True)
            status = self.folder.stat()
        except OSError as error:
            raise ConfigError(f"data.cache.folder {folder}: {error.strerror}") from error
        # A name in a shared temporary folder may have been taken by somebody else before.
        is_foreign = os.geteuid() != 0 and status.st_uid not in (os.geteuid(), 0)
        if is_foreign or status.st_mode & stat.S_IWOTH:
            raise ConfigError(
                f"data.cache.folder {folder}: is not this user's, or all users may write into it; "
                "name a folder of your own"
            )

    def open(self, file: CachedFile) -> int:
        """Return a handle of the whole file, fetched first where it is not there.

        The file stays in the cache as long as the handle is open.

        Raises:
            BadSample, DataError: it is gone, comes damaged or cannot be fetched; which of the two,
                the policy of outages says.
            DataError: the cache is too small or cannot be written.
        """
        self._check(file)
        path = self.folder / file.path
        patience = time.monotonic() + _FULL_SECONDS
        while True:
            try:
                handle = _open_whole(path, file.bytes)
                if handle is not None:
                    return handle
                self._fill(file, path)
            except OSError as error:
                raise DataError(f"data.cache.folder {self.folder}: {error.strerror}") from error
            except _Full:
                for release in self._release:
                    release()
                if time.monotonic() > patience:
                    raise DataError(
                        f"data.cache.limit {self.limit:,} bytes is too small: everything in "
                        f"{self.folder} is being read, and {file.name} of {file.bytes:,} bytes "
                        "does not fit beside it; raise the limit, or lower data.shuffle_window"
                    ) from None
                time.sleep(random.uniform(0.1, 0.3))

    def holds(self, file: CachedFile) -> bool:
        """Return whether the whole file is here."""
        return (self.folder / file.path).exists()

    def prefetch(self, file: CachedFile) -> None:
        """Fetch a file in the background of this process; trouble shows when it is opened."""
        if self._background is None or self._background[0] != os.getpid():
            queue: SimpleQueue[CachedFile] = SimpleQueue()
            self._background = os.getpid(), queue
            for _ in range(FETCHED_AHEAD):
                threading.Thread(target=self._fetch_all, args=(queue,), daemon=True).start()
        self._background[1].put(file)

    def when_full(self, release: Callable[[], object]) -> None:
        """Have `release` called when room is wanted; it closes files that it holds open."""
        self._release.append(release)

    def used(self) -> int:
        """Return the bytes of all files, those being fetched included with their full length."""
        return sum(size for _, size, _ in self._files())

    def _fetch_all(self, queue: SimpleQueue[CachedFile]) -> None:
        while True:
            file = queue.get()
            path = self.folder / file.path
            with suppress(BadSample, DataError, _Full, OSError):
                self._check(file)
                if path.exists():
                    os.utime(path)  # soon to be read, so not to be removed before others
                else:
                    self._fill(file, path, wait=False)

    def _check(self, file: CachedFile) -> None:
        if file.bytes > self.limit:
            raise DataError(
                f"data.cache.limit {self.limit:,} bytes cannot hold {file.folder / file.name} of "
                f"{file.bytes:,} bytes"
            )
        failure = self._failures.get(file.path)
        if failure is not None and time.monotonic() < failure.until:
            raise given_up(failure.bad, file.folder.outages.policy, failure.may_pass)

    def _fill(self, file: CachedFile, path: Path, wait: bool = True) -> None:
        """Fetch a file, unless somebody else did, or does, whom `wait` says to wait for."""
        part = path.with_name(path.name + _PART)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _own(part, path, wait) as wanted:
            if not wanted:
                return
            self._check(file)  # a thread of this process may have tried meanwhile
            self._make_room(file)
            self._fetch(file, part)
            part.rename(path)
        self._failures.pop(file.path, None)

    def _fetch(self, file: CachedFile, part: Path) -> None:
        where = file.folder / file.name

        def attempt() -> None:
            try:
                file.folder.fetch(file.name, str(part))
            except OSError as error:
                if error.errno in _DISK_TROUBLE:
                    raise DataError(
                        f"data.cache.folder {self.folder}: {error.strerror}; it may hold "
                        f"data.cache.limit {self.limit:,} bytes"
                    ) from error
                raise
            _require_whole(file, part)

        try:
            patiently(attempt, file.folder.outages.seconds, where)
            sync_path(part)
        except (FileNotFoundError, PermissionError) as error:
            self._fail(file, BadSample("missing shard", f"{where} ({error})"), error)
        except Unreachable as error:
            kind = "corrupt shard" if isinstance(error.__cause__, _NotWhole) else "missing shard"
            self._fail(file, BadSample(kind, f"{where} ({error})"), error)

    def _fail(self, file: CachedFile, bad: BadSample, cause: Exception) -> NoReturn:
        may_pass = isinstance(cause, Unreachable)
        self._failures[file.path] = _Failure(time.monotonic() + _FAILURE_SECONDS, bad, may_pass)
        raise given_up(bad, file.folder.outages.policy, may_pass) from cause

    def _make_room(self, file: CachedFile) -> None:
        """List a file that is being fetched, and remove others until all that is there fits."""
        with open(self.folder / "lock", "a", opener=unfollowed) as lock:
            flock(lock, LOCK_EX)
            listed = self._listed()
            if file.path not in listed:
                kept = [path for path in listed if any(map(os.path.exists, self._places(path)))]
                content = json.dumps([*kept, file.path], indent=0)
                write_text(self.folder / _FETCHED, content, durable=True)
            files = sorted(self._files())
            excess = sum(size for _, size, _ in files) - self.limit
            if excess <= 0:
                return
            for _, size, path in files:
                if excess > 0 and _remove_unused(path):
                    excess -= size
            # Counted again: what was not where it had been seen may have been renamed, not removed.
            if self.used() > self.limit:
                raise _Full

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Yield last use, full length and path of every file of the cache."""
        for name in self._listed():
            if found := _PATH.fullmatch(name):
                for path in self._places(name):
                    with suppress(FileNotFoundError):
                        yield os.stat(path).st_mtime, int(found[1]), path

    def _listed(self) -> list[str]:
        """Return the paths of all files that any process has begun to fetch."""
        try:
            return [*map(str, parse_json((self.folder / _FETCHED).read_bytes()))]
        except (FileNotFoundError, ValueError, TypeError):
            return []

    def _places(self, path: str) -> tuple[str, str]:
        """Return where a file is while it is fetched, and when it is whole.

        Looked at in this order: a file that is renamed meanwhile is seen, if anything, twice.
        """
        place = str(self.folder / path)
        return place + _PART, place

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "limit": self.limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"], state["limit"])  # type: ignore[misc]


class _NotWhole(Exception):
    """Error for a download that differs from what the index or the manifest says."""


def _require_whole(file: CachedFile, part: Path) -> None:
    size = part.stat().st_size
    if size != file.bytes:
        raise _NotWhole(f"{size:,} bytes came, its index says {file.bytes:,}")
    if file.sha256 is not None and sha256_of(part) != file.sha256:
        raise _NotWhole("its SHA-256 is not that of the manifest")


def _open_whole(path: Path, size: int) -> int | None:
    """Return a handle with a shared lock on a file of the cache, or None where there is none."""
    try:
        handle = os.open(path, os.O_RDONLY | _FLAGS)
    except FileNotFoundError:
        return None
    flock(handle, LOCK_SH)
    status = os.fstat(handle)
    if status.st_nlink and status.st_size == size:
        os.utime(handle)
        return handle
    os.close(handle)
    if status.st_nlink:  # damaged after it was fetched
        path.unlink(missing_ok=True)
    return None


@contextmanager
def _own(part: Path, path: Path, wait: bool) -> Iterator[bool]:
    """Hold the lock of a file being fetched.

    False if somebody else has fetched it by then or, without `wait`, is at it.
    """
    while True:
        handle = os.open(part, os.O_RDWR | os.O_CREAT | _FLAGS, 0o644)
        try:
            try:
                flock(handle, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                if not wait:
                    yield False
                    return
                # Whoever fetches it is waited for. By now it may be whole and have its name, and
                # its readers, who may read it for long, would keep an exclusive lock waiting.
                flock(handle, LOCK_SH)
                continue
            ours = _is(handle, part)
            if path.exists():
                if ours:
                    part.unlink(missing_ok=True)
                yield False
                return
            if ours:
                try:
                    yield True
                finally:
                    if _is(handle, part):  # it was not renamed
                        part.unlink(missing_ok=True)
                return
        finally:
            os.close(handle)


def _is(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _remove_unused(path: str) -> bool:
    """Remove a file unless somebody reads or fetches it."""
    try:
        handle = os.open(path, os.O_RDONLY | _FLAGS)
    except FileNotFoundError:
        return True
    try:
        flock(handle, LOCK_EX | LOCK_NB)
        os.unlink(path)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True
    finally:
        os.close(handle)
    return True
