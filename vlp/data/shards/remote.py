"""Shards behind a URL, read by fsspec: retries, the remote folder, and its local cache."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import random
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit

import numpy as np
from pydantic import Field

from vlp.config import Config, ConfigError
from vlp.data.shards.sample_files import BadSample, DataError, outage_error
from vlp.io import (
    HIDDEN,
    REFERENCE,
    open_nofollow,
    parse_json,
    redact,
    sha256_of,
    sync_path,
    write_text,
)

# Exponential backoff: seconds before the first retry, and at most.
_FIRST_WAIT = 1.0
_LONGEST_WAIT = 30.0

# HTTP client errors that are not retried: all but request timeout and too many requests.
_REFUSALS = tuple(status for status in range(400, 500) if status not in (408, 429))

# Exceptions of S3 and Google Cloud without credentials.
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")

Value = TypeVar("Value")


class OutageConfig(Config):
    """Policy for a store that is unreachable, answers with errors, or has damaged files."""

    seconds: float = Field(
        600.0,
        ge=0,
        description="how long a file is retried after its first failure; keep it below "
        "training.timeout, after which ranks give up on each other",
    )
    policy: Literal["fail", "pause", "skip"] = Field(
        "fail",
        description="fail: end the run; pause: end it with exit code 75, so that the scheduler "
        "starts it again; skip: skip and count the file's samples",
    )


DEFAULT_OUTAGES = OutageConfig()


class Unreachable(Exception):
    """Failure of the last retry of a file."""


_retries: Any = None


def retries() -> Any:
    """Return the counter of retries of this process and its loader workers."""
    global _retries
    if _retries is None:
        _retries = multiprocessing.Value("q", 0)
    return _retries


def share_retries(counter: Any) -> None:
    """Count this worker's retries on its parent's counter."""
    global _retries
    _retries = counter


def with_retries(attempt: Callable[[], Value], seconds: float, location: object) -> Value:
    """Return the value of `attempt`, which is retried for `seconds` after its first failure.

    FileNotFoundError, PermissionError, ConfigError and DataError are raised at once; Unreachable
    after the last retry. The first failure prints a message with `location`.
    """
    deadline, wait, tries = float("inf"), _FIRST_WAIT, 0
    while True:
        try:
            return attempt()
        except (FileNotFoundError, PermissionError, ConfigError, DataError):
            raise
        except Exception as error:  # each store raises exceptions of its own
            tries += 1
            message = redact(str(error))
            reason = f"{type(error).__name__}: {message}" if message else type(error).__name__
            cause = error if message == str(error) else None  # the traceback would show secrets
            if getattr(error, "status", 0) in _REFUSALS or type(error).__name__ in _NO_CREDENTIALS:
                raise PermissionError(reason) from cause
            if tries == 1:
                deadline = time.monotonic() + seconds
                print(f"{location}: {reason}; retrying for {seconds:g} s", file=sys.stderr)
            # Random, so that a thousand ranks that failed together do not retry together.
            pause = wait * random.uniform(0.5, 1.0)
            if time.monotonic() + pause > deadline:
                raise Unreachable(f"{reason}; tried {tries} times") from cause
        time.sleep(pause)
        with retries().get_lock():
            retries().value += 1
        wait = min(2 * wait, _LONGEST_WAIT)


MANIFEST_NAME = "manifest.json"
# User info or query of a URL: values of variables are percent-encoded there.
_QUOTED = re.compile(r"https?://[^/?#]*@|\?.*")
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)

# Timeouts of a connection and of a read without a byte. aiohttp's default, 5 minutes for a whole
# file, would cut off large shards.
_CONNECT_SECONDS, _READ_SECONDS = 30.0, 60.0


def is_url(location: object) -> bool:
    """Return whether a location is a URL."""
    return isinstance(location, str) and "://" in location


class RemoteFolder:
    """A folder behind a URL; each process opens its own connection."""

    def __init__(self, url: str, outages: OutageConfig = DEFAULT_OUTAGES) -> None:
        self.url, self.outages = url.rstrip("/"), outages
        self._connection: tuple[int, tuple[Any, str]] | None = None
        self._connect()

    def __str__(self) -> str:
        return redact(self.url)

    def __truediv__(self, name: str) -> str:
        return f"{redact(self.url.partition('?')[0])}/{name}"

    def read(self, name: str, optional: bool = False) -> bytes | None:
        """Return a small file; None if missing or, if `optional`, forbidden."""

        def attempt() -> bytes:
            files, path = self._connect()
            return files.cat_file(f"{path}/{name}")

        try:
            return with_retries(attempt, self.outages.seconds, self / name)
        except FileNotFoundError:
            return None
        except PermissionError as error:
            if optional:
                return None
            raise ConfigError(f"{self / name}: the store denies access ({error})") from error
        except Unreachable as error:
            if self.outages.policy == "pause":  # a run restarted within an outage pauses again
                bad = BadSample("missing shard", f"{self / name} ({error})")
                raise outage_error(bad, self.outages.policy) from error
            raise ConfigError(f"{self / name}: cannot be fetched ({error})") from error

    def fetch(self, name: str, target: str) -> None:
        """Download a file to a local path, without retries."""
        files, path = self._connect()
        files.get_file(f"{path}/{name}", target)

    def digests(self, names: np.ndarray) -> dict[str, str]:
        """Return the SHA-256 of shards by name, as far as the folder's manifest.json has them."""
        content = self.read(MANIFEST_NAME, optional=True)
        if content is None:
            return {}
        shard_names = {name.decode() for name in names.tolist()}
        try:
            shards = parse_json(content)["shards"]
            digests = {shard["name"]: shard["sha256"] for shard in shards if shard.get("sha256")}
            # Digests become part of paths.
            if not all(map(_SHA256.fullmatch, digests.values())):
                raise ValueError("a sha256 is not 64 hexadecimal digits")
            return {name: digest for name, digest in digests.items() if name in shard_names}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f'{self / MANIFEST_NAME}: not a manifest {{"shards": [{{"name", "sha256"}}]}}'
            ) from error

    def _connect(self) -> tuple[Any, str]:
        # A forked process must not use its parent's connection.
        if self._connection is None or self._connection[0] != os.getpid():
            self._connection = os.getpid(), open_filesystem(self.url)
        return self._connection[1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_connection": None}


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the path in it, with `${NAME}` expanded."""
    import fsspec

    protocol, location = url.split("://")[0], _expand_variables(url)
    options: dict[str, Any] = {}
    try:
        if protocol in ("http", "https"):
            import aiohttp

            timeout = aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS
            )
            options["client_kwargs"] = {"timeout": timeout}
            # Credentials and query are request options: error messages show the path.
            parts = urlsplit(location)
            if parts.username is not None:
                user = unquote(parts.username), unquote(parts.password or "")
                options["client_kwargs"]["auth"] = aiohttp.BasicAuth(*user)
            if parts.query:
                options["params"] = parse_qsl(parts.query, keep_blank_values=True)
            host = parts.netloc.rpartition("@")[2]
            location = urlunsplit((parts.scheme, host, parts.path, "", ""))
        files, path = fsspec.core.url_to_fs(location, **options)
    except ImportError as error:
        raise ConfigError(f"{url}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{url}: unknown protocol {protocol!r}") from error
    return files, path


def _expand_variables(url: str) -> str:
    if HIDDEN in url:
        raise ConfigError(
            f"{url}: {HIDDEN} stands for a secret that was left out; give the whole URL, or write "
            "${NAME} for an environment variable in its place"
        )
    missing = [name for name in REFERENCE.findall(url) if name not in os.environ]
    if missing:
        raise ConfigError(f"{url}: the environment variable {missing[0]} is not set; set it")
    # Paths are inserted unquoted; in user info and query `/`, `@` and `&` are delimiters.
    if re.search("https?://", url):
        url = _QUOTED.sub(
            lambda part: REFERENCE.sub(lambda name: quote(os.environ[name[1]], safe=""), part[0]),
            url,
        )
    return REFERENCE.sub(lambda name: os.environ[name[1]], url)


def file_of(url: str) -> tuple[str, str]:
    """Split a URL (or path) of a file into its folder, with the query, and the file's name."""
    path, mark, query = url.partition("?")
    folder, _, name = path.rpartition("/")
    return f"{folder}{mark}{query}", name


# --- The cache ---
# Any number of processes share a folder without a server. A file is renamed to its final name when
# it is complete and verified, so that no process reads a partial one. Locks are the kernel's
# (`flock`) and end with their process. A reader holds a shared lock on its file, and eviction
# removes only files without one. `fetched.json` lists the cache's files: others in the folder are
# neither counted nor removed.

_PART = ".part"
_FETCHED = "fetched.json"
_PATH = re.compile(r"[0-9a-f]{16}/[^/]+\.(?:[0-9a-f]{16}|unknown)\.(\d+)")
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW

# A failed shard is not retried for this long: each of its thousand samples would wait for it.
_FAILURE_SECONDS = 600

# Prefetching threads of a process. With a single thread, a reader that waits for the file being
# downloaded would keep any other file from being downloaded.
PREFETCH_THREADS = 2

# How long to wait for other processes to close files of a full cache.
_FULL_SECONDS = 30.0

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class CachedFile(NamedTuple):
    """A file of a remote folder: its name, length in bytes and, if known, SHA-256."""

    folder: RemoteFolder
    name: str
    bytes: int
    sha256: str | None = None

    @property
    def path(self) -> str:
        """Path in the cache's folder, with the SHA-256, if known, and the length in its name."""
        source = hashlib.blake2b(self.folder.url.encode(), digest_size=8).hexdigest()
        return f"{source}/{self.name}.{(self.sha256 or 'unknown')[:16]}.{self.bytes}"


class _Failure(NamedTuple):
    until: float  # of time.monotonic
    bad: BadSample
    may_pass: bool


class _CacheFull(Exception):
    """Error of a full cache: every file in it is being read or downloaded."""


class ShardCache:
    """A local folder of downloads with LRU eviction, shared by processes, forked or spawned.

    `limit` bounds the bytes of all files, including those being downloaded.
    """

    def __init__(self, folder: str | Path, limit: int) -> None:
        self.folder, self.limit = Path(folder), limit
        self.on_full: list[Callable[[], object]] = []  # called to close open files for eviction
        self._failures: dict[str, _Failure] = {}
        self._background: tuple[int, SimpleQueue[CachedFile]] | None = None
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(0o700, exist_ok=True)
            status = self.folder.stat()
        except OSError as error:
            raise ConfigError(f"data.cache.folder {folder}: {error.strerror}") from error
        # Another user may have created a folder of this name in a shared temporary folder.
        is_foreign = os.geteuid() != 0 and status.st_uid not in (os.geteuid(), 0)
        if is_foreign or status.st_mode & stat.S_IWOTH:
            raise ConfigError(
                f"data.cache.folder {folder}: belongs to another user, or all users may write into "
                "it; give a folder of your own"
            )

    def open(self, file: CachedFile) -> int:
        """Open a file, downloaded first if missing; raises BadSample or DataError."""
        self._require_available(file)
        path = self.folder / file.path
        deadline = time.monotonic() + _FULL_SECONDS
        while True:
            try:
                # The handle holds a shared lock, so that no process evicts the file.
                handle = _open_complete(path, file.bytes)
                if handle is not None:
                    return handle
                self._fill(file, path)
            except OSError as error:
                raise DataError(f"data.cache.folder {self.folder}: {error.strerror}") from error
            except _CacheFull:
                for release in self.on_full:
                    release()
                if time.monotonic() > deadline:
                    raise DataError(
                        f"data.cache.limit {self.limit:,} bytes is too small: everything in "
                        f"{self.folder} is being read, and {file.name} of {file.bytes:,} bytes "
                        "does not fit beside it; raise the limit, or lower data.shuffle_window"
                    ) from None
                time.sleep(random.uniform(0.1, 0.3))

    def holds(self, file: CachedFile) -> bool:
        """Return whether the cache holds the complete file."""
        return (self.folder / file.path).exists()

    def prefetch(self, file: CachedFile) -> None:
        """Download a file in the background; `open` raises its errors."""
        if self._background is None or self._background[0] != os.getpid():
            queue: SimpleQueue[CachedFile] = SimpleQueue()
            self._background = os.getpid(), queue
            for _ in range(PREFETCH_THREADS):
                threading.Thread(target=self._fetch_all, args=(queue,), daemon=True).start()
        self._background[1].put(file)

    def bytes_used(self) -> int:
        """Return the bytes of all files; files being downloaded count with their full length."""
        return sum(size for _, size, _ in self._files())

    def _fetch_all(self, queue: SimpleQueue[CachedFile]) -> None:
        while True:
            file = queue.get()
            path = self.folder / file.path
            with suppress(BadSample, DataError, _CacheFull, OSError):
                self._require_available(file)
                if path.exists():
                    os.utime(path)  # read soon: other files are evicted before it
                else:
                    self._fill(file, path, wait=False)

    def _require_available(self, file: CachedFile) -> None:
        """Refuse a file that is larger than the cache, or that failed a short time ago."""
        if file.bytes > self.limit:
            raise DataError(
                f"data.cache.limit {self.limit:,} bytes cannot hold {file.folder / file.name} of "
                f"{file.bytes:,} bytes"
            )
        failure = self._failures.get(file.path)
        if failure is not None and time.monotonic() < failure.until:
            raise outage_error(failure.bad, file.folder.outages.policy, failure.may_pass)

    def _fill(self, file: CachedFile, path: Path, wait: bool = True) -> None:
        """Download a file unless another process does; with `wait` then wait for that process."""
        part = path.with_name(path.name + _PART)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _fetch_lock(part, path, wait) as is_missing:
            if not is_missing:
                return
            self._require_available(file)  # another thread may have failed meanwhile
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
                if error.errno in _DISK_ERRORS:
                    raise DataError(
                        f"data.cache.folder {self.folder}: {error.strerror}; it needs room for "
                        f"data.cache.limit {self.limit:,} bytes"
                    ) from error
                raise
            _require_complete(file, part)

        try:
            with_retries(attempt, file.folder.outages.seconds, where)
            sync_path(part)
        except (FileNotFoundError, PermissionError, Unreachable) as error:
            is_corrupt = isinstance(error.__cause__, _IncompleteDownload)
            kind = "corrupt shard" if is_corrupt else "missing shard"
            bad, may_pass = BadSample(kind, f"{where} ({error})"), isinstance(error, Unreachable)
            self._failures[file.path] = _Failure(time.monotonic() + _FAILURE_SECONDS, bad, may_pass)
            raise outage_error(bad, file.folder.outages.policy, may_pass) from error

    def _make_room(self, file: CachedFile) -> None:
        """List a file as being downloaded, and evict others until all files fit the limit."""
        with open(self.folder / "lock", "a", opener=open_nofollow) as lock:
            flock(lock, LOCK_EX)
            listed = self._listed_paths()
            if file.path not in listed:
                existing = [n for n in listed if any(map(os.path.exists, self._paths_of(n)))]
                content = json.dumps([*existing, file.path], indent=0)
                write_text(self.folder / _FETCHED, content, durable=True)
            files = sorted(self._files())
            excess = sum(size for _, size, _ in files) - self.limit
            if excess <= 0:
                return
            for _, size, path in files:
                if excess > 0 and _remove_unused(path):
                    excess -= size
            # Count again: a file missing at its path may have been renamed instead of removed.
            if self.bytes_used() > self.limit:
                raise _CacheFull

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Yield the last use (seconds since 1970), full length and path of every file."""
        for name in self._listed_paths():
            if match := _PATH.fullmatch(name):
                for path in self._paths_of(name):
                    with suppress(FileNotFoundError):
                        yield os.stat(path).st_mtime, int(match[1]), path

    def _listed_paths(self) -> list[str]:
        """Return the relative paths of all files, complete or being downloaded by any process."""
        try:
            return [*map(str, parse_json((self.folder / _FETCHED).read_bytes()))]
        except (FileNotFoundError, ValueError, TypeError):
            return []

    def _paths_of(self, path: str) -> tuple[str, str]:
        """Return a file's paths during and after its download, in the order of renaming."""
        full_path = str(self.folder / path)
        return full_path + _PART, full_path

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"on_full": [], "_failures": {}, "_background": None}


class _IncompleteDownload(Exception):
    """Download that differs from the index or the manifest."""


def _require_complete(file: CachedFile, part: Path) -> None:
    size = part.stat().st_size
    if size != file.bytes:
        raise _IncompleteDownload(f"received {size:,} bytes, the index says {file.bytes:,}")
    if file.sha256 is not None and sha256_of(part) != file.sha256:
        raise _IncompleteDownload("the SHA-256 differs from the manifest's")


def _open_complete(path: Path, size: int) -> int | None:
    """Return a handle with a shared lock on a complete file of the cache, else None."""
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
    if status.st_nlink:  # of another length: damaged after its download
        path.unlink(missing_ok=True)
    return None


@contextmanager
def _fetch_lock(part: Path, path: Path, wait: bool) -> Iterator[bool]:
    """Lock a download, yield True; False if it is done or, without `wait`, if others download."""
    while True:
        handle = os.open(part, os.O_RDWR | os.O_CREAT | _FLAGS, 0o644)
        try:
            try:
                flock(handle, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                if not wait:
                    yield False
                    return
                # Wait for the other process by a shared lock: after the download, readers hold
                # shared locks for long, and an exclusive lock would wait for them.
                flock(handle, LOCK_SH)
                continue
            is_current = _is_same_file(handle, part)
            if path.exists():
                if is_current:
                    part.unlink(missing_ok=True)
                yield False
                return
            if is_current:
                try:
                    yield True
                finally:
                    if _is_same_file(handle, part):  # failed: not renamed
                        part.unlink(missing_ok=True)
                return
        finally:
            os.close(handle)


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _remove_unused(path: str) -> bool:
    """Remove a file and return True, unless it is being read or downloaded."""
    with suppress(FileNotFoundError):
        handle = os.open(path, os.O_RDONLY | _FLAGS)
        try:
            flock(handle, LOCK_EX | LOCK_NB)
            os.unlink(path)
        except BlockingIOError:
            return False
        finally:
            os.close(handle)
    return True
