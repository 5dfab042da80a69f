"""Folders of shards behind a URL, by fsspec: http(s)://, s3://, gs://, file:// and many more."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit

import numpy as np

from vlp.config import ConfigError
from vlp.data.shards.outages import (
    DEFAULT_OUTAGES,
    OutageConfig,
    Unreachable,
    given_up,
    patiently,
)
from vlp.data.shards.sample_files import BadSample
from vlp.io import HIDDEN, REFERENCE, parse_json, redacted

MANIFEST_NAME = "manifest.json"
# User info and query, where the value of a variable is quoted.
_QUOTED = re.compile(r"https?://[^/?#]*@|\?.*")
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)

# Without limits a dead connection would be waited for, and a large shard cut off after 5 minutes.
_CONNECT_SECONDS = 30


def is_url(place: object) -> bool:
    """Return whether a place is a URL rather than a path."""
    return isinstance(place, str) and "://" in place


class RemoteFolder:
    """A folder behind a URL. Connections are made where they are used, in any process.

    Args:
        url: of the folder, with its protocol; see `connected`.
        outages: what to do when the store fails.

    Raises:
        ConfigError: see `connected`.
    """

    def __init__(self, url: str, outages: OutageConfig = DEFAULT_OUTAGES) -> None:
        self.url, self.outages = url.rstrip("/"), outages
        self._connection: tuple[int, tuple[Any, str]] | None = None
        self._connect()

    def __str__(self) -> str:
        return redacted(self.url)

    def __truediv__(self, name: str) -> str:
        """Return what messages call a file."""
        return f"{redacted(self.url.partition('?')[0])}/{name}"

    def read(self, name: str, optional: bool = False) -> bytes | None:
        """Return a small file, or None where there is none.

        Args:
            name: of the file.
            optional: a file that we may not read is as good as none; some stores say nothing else
                of files that are not there.

        Raises:
            ConfigError: it cannot be fetched.
            PausedDataError: the store does not answer, and the policy is to pause.
        """

        def attempt() -> bytes:
            files, path = self._connect()
            return files.cat_file(f"{path}/{name}")

        try:
            return patiently(attempt, self.outages.seconds, self / name)
        except FileNotFoundError:
            return None
        except PermissionError as error:
            if optional:
                return None
            raise ConfigError(f"{self / name}: the store refuses it ({error})") from error
        except Unreachable as error:
            if self.outages.policy == "pause":  # a start within an outage is one more pause
                bad = BadSample("missing shard", f"{self / name} ({error})")
                raise given_up(bad, self.outages.policy) from error
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
            shards = parse_json(content)["shards"]
            found = {shard["name"]: shard["sha256"] for shard in shards if shard.get("sha256")}
            # They become parts of paths.
            if not all(map(_SHA256.fullmatch, found.values())):
                raise ValueError("a sha256 of other than 64 hexadecimal digits")
            return {name: digest for name, digest in found.items() if name in known}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f'{self / MANIFEST_NAME}: not a manifest {{"shards": [{{"name", "sha256"}}]}}'
            ) from error

    def _connect(self) -> tuple[Any, str]:
        # A connection is of one process: a forked one must not use its parent's.
        if self._connection is None or self._connection[0] != os.getpid():
            self._connection = os.getpid(), connected(self.url, self.outages.silence)
        return self._connection[1]

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "outages": self.outages}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.url, self.outages = state["url"], state["outages"]
        self._connection = None


def connected(url: str, silence: float) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it.

    `${NAME}` in a URL is a variable of the environment; its value is percent-encoded in user info
    and query of an HTTP URL and inserted as it is elsewhere. These two go with every request
    instead of standing in the path, which libraries show in their errors. `silence` is the seconds
    without a byte after which an HTTP request fails.

    Raises:
        ConfigError: its protocol is not known, the package it needs is not installed, a variable
            is not set, or the URL was written without its secrets.
    """
    import fsspec

    protocol, place = url.split("://")[0], _revealed(url)
    options: dict[str, Any] = {}
    try:
        if protocol in ("http", "https"):
            import aiohttp

            patience = aiohttp.ClientTimeout(
                total=None, sock_connect=min(_CONNECT_SECONDS, silence), sock_read=silence
            )
            options["client_kwargs"] = {"timeout": patience}
            parts = urlsplit(place)
            if parts.username is not None:
                user = unquote(parts.username), unquote(parts.password or "")
                options["client_kwargs"]["auth"] = aiohttp.BasicAuth(*user)
            if parts.query:
                options["params"] = parse_qsl(parts.query, keep_blank_values=True)
            host = parts.netloc.rpartition("@")[2]
            place = urlunsplit((parts.scheme, host, parts.path, "", ""))
        files, path = fsspec.core.url_to_fs(place, **options)
    except ImportError as error:
        raise ConfigError(f"{url}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{url}: the protocol {protocol!r} is not known") from error
    return files, path


def _revealed(url: str) -> str:
    """Return a URL with the values of the variables that it names.

    Raises:
        ConfigError: see `connected`.
    """
    if HIDDEN in url:
        raise ConfigError(
            f"{url}: {HIDDEN} stands for what was left out when this was written; name the URL as "
            "it was, or with ${NAME} for a variable of the environment in its place"
        )
    missing = [name for name in REFERENCE.findall(url) if name not in os.environ]
    if missing:
        raise ConfigError(f"{url}: the environment has no variable {missing[0]}; set it")
    if re.search("https?://", url):
        url = _QUOTED.sub(
            lambda part: _with_values(part[0], lambda text: quote(text, safe="")), url
        )
    return _with_values(url, str)


def _with_values(text: str, written: Callable[[str], str]) -> str:
    return REFERENCE.sub(lambda found: written(os.environ[found[1]]), text)


def file_of(url: str) -> tuple[str, str]:
    """Return the URL of a file's folder, with the file's query, and the file's name."""
    path, mark, query = url.partition("?")
    folder, _, name = path.rpartition("/")
    return f"{folder}{mark}{query}", name
