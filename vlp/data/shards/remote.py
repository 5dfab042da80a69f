"""Folders of shards behind a URL, by fsspec: http(s)://, s3://, gs://, file:// and many more."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from vlp.config import ConfigError
from vlp.data.shards.bad_samples import DataError

MANIFEST_NAME = "manifest.json"

# Seconds before the second try, doubled before each later one: half a minute of trying in all.
_TRIES = 6
_FIRST_WAIT = 1.0

# Without these a dead connection would be waited for, and a large shard cut off after 5 minutes.
_CONNECT_SECONDS = 30
_SILENT_SECONDS = 60

# HTTP: the request took too long, too many requests.
_WORTH_ANOTHER_TRY = (408, 429)

Value = TypeVar("Value")


class Unreachable(Exception):
    """A file that was tried for long enough; the message says the last reason."""


def is_url(place: object) -> bool:
    """Return whether a place is a URL rather than a path."""
    return isinstance(place, str) and "://" in place


class RemoteFolder:
    """A folder behind a URL. Connections are made where they are used, in any process.

    Args:
        url: of the folder, with its protocol.

    Raises:
        ConfigError: no such protocol is known, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._connection: tuple[int, tuple[Any, str]] | None = None
        self._connect()

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> str:
        return f"{self.url}/{name}"

    def read(self, name: str, optional: bool = False) -> bytes | None:
        """Return a small file, or None where there is none.

        Args:
            name: of the file.
            optional: a file that we may not read is as good as none; some stores say nothing else
                of files that are not there.

        Raises:
            ConfigError: it cannot be fetched.
        """

        def attempt() -> bytes:
            files, path = self._connect()
            return files.cat_file(f"{path}/{name}")

        try:
            return patiently(attempt)
        except FileNotFoundError:
            return None
        except PermissionError as error:
            if optional:
                return None
            raise ConfigError(f"{self / name}: the store refuses it ({error})") from error
        except Unreachable as error:
            raise ConfigError(f"{self / name}: cannot be fetched ({error})") from error

    def fetch(self, name: str, target: str) -> None:
        """Write a file to a local path, in one try.

        Raises:
            FileNotFoundError: there is none.
            Exception: whatever else goes wrong on the way.
        """
        files, path = self._connect()
        files.get_file(f"{path}/{name}", target)

    def digests(self, names: np.ndarray) -> dict[str, str]:
        """Return SHA-256 of the shards as far as the folder's manifest.json says them.

        Raises:
            ConfigError: the manifest cannot be read.
        """
        content = self.read(MANIFEST_NAME, optional=True)
        if content is None:
            return {}
        known = {name.decode() for name in names.tolist()}
        try:
            shards = json.loads(content)["shards"]
            found = {shard["name"]: shard["sha256"] for shard in shards if "sha256" in shard}
            return {name: str(digest) for name, digest in found.items() if name in known}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f'{self / MANIFEST_NAME}: not a manifest {{"shards": [{{"name", "sha256"}}]}}'
            ) from error

    def _connect(self) -> tuple[Any, str]:
        # A connection is of one process: a forked one must not use its parent's.
        if self._connection is None or self._connection[0] != os.getpid():
            self._connection = os.getpid(), connected(self.url)
        return self._connection[1]

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.url = state["url"]
        self._connection = None


def connected(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it.

    Raises:
        ConfigError: its protocol is not known, or the package it needs is not installed.
    """
    import fsspec

    protocol = url.split("://")[0]
    options: dict[str, Any] = {}
    try:
        if protocol in ("http", "https"):
            import aiohttp

            patience = aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENT_SECONDS
            )
            options["client_kwargs"] = {"timeout": patience}
        files, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise ConfigError(f"{url}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{url}: the protocol {protocol!r} is not known") from error
    return files, path


def patiently(attempt: Callable[[], Value]) -> Value:
    """Return the value of `attempt`, which is tried again after growing pauses.

    Raises:
        FileNotFoundError, PermissionError, ConfigError, DataError: at once; another try would end
            as this one.
        Unreachable: the last of several tries failed.
    """
    for number in range(_TRIES):
        try:
            return attempt()
        except (FileNotFoundError, PermissionError, ConfigError, DataError):
            raise
        except Exception as error:  # every store has its own
            status = getattr(error, "status", 0)
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            if 400 <= status < 500 and status not in _WORTH_ANOTHER_TRY:
                raise PermissionError(reason) from error
            if number == _TRIES - 1:
                raise Unreachable(f"{reason}; tried {_TRIES} times") from error
        # A thousand ranks that failed together must not come back together.
        time.sleep(_FIRST_WAIT * 2**number * random.uniform(0.75, 1.25))
    raise AssertionError
