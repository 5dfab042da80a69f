"""Locations of shards: a folder, or a URL with a cache on a local disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

import numpy as np

from vlp.config import ConfigError
from vlp.data.shards.bad_samples import DataError
from vlp.data.shards.cache import CachedFile, ShardCache
from vlp.data.shards.index import ShardEntry, ShardTable, map_samples, table_bytes
from vlp.data.shards.outages import given_up
from vlp.data.shards.remote import RemoteFolder
from vlp.data.shards.sample_files import BadSample

# Of the cache: rows of samples that take more are not fetched to save the reading of headers.
_SMALL_SHARE = 0.01


class OpenShard(NamedTuple):
    """An open file and its length."""

    handle: int
    bytes: int


class ShardLocation:
    """Place where the shards of a `ShardIndex` lie.

    `folder / name` names a shard in messages; `is_remote` says that files are fetched first;
    `policy` says what follows where a shard cannot be had (see `OutageConfig`).
    """

    folder: Path | RemoteFolder
    policy: str
    is_remote = False

    def open(self, entry: ShardEntry) -> OpenShard:
        """Open a shard; raises BadSample where it cannot be had."""
        raise NotImplementedError

    def rows(self, shards: ShardTable, wait: bool) -> np.ndarray | None:
        """Return the rows of all samples; None if there are none, or without `wait` none yet.

        With `wait` they are checked, too.
        """
        raise NotImplementedError

    def prefetch(self, entry: ShardEntry) -> None:
        """Fetch a shard that will be opened soon; a local one is here."""

    def when_full(self, release: Callable[[], object]) -> None:
        """Have `release` called when room for another shard is wanted: it closes shards."""


class LocalFolder(ShardLocation):
    """A folder of shards, read where they lie."""

    folder: Path

    def __init__(self, folder: Path, policy: str = "fail") -> None:
        self.folder, self.policy = folder, policy

    def open(self, entry: ShardEntry) -> OpenShard:
        """Open a shard.

        Raises:
            BadSample, DataError: it cannot be read; which of the two, the policy says.
            OSError: this process, or the system, can open no more files.
        """
        path = self.folder / entry.name
        try:
            # Without waiting: a pipe of that name would otherwise wait for a writer for ever.
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            bad = BadSample("missing shard", f"{path} ({error.strerror})")
            may_pass = not isinstance(error, FileNotFoundError)
            raise given_up(bad, self.policy, may_pass) from error
        status = os.fstat(handle)
        if not S_ISREG(status.st_mode):
            os.close(handle)
            raise given_up(
                BadSample("missing shard", f"{path} (it is no file)"), self.policy, False
            )
        return OpenShard(handle, status.st_size)

    def rows(self, shards: ShardTable, wait: bool) -> np.ndarray | None:
        """Return the rows of all samples, mapped into memory."""
        return map_samples(self.folder / shards.file, shards, check=wait)


class CachedFolder(ShardLocation):
    """Shards behind a URL, each fetched whole into the cache when it is needed.

    Args:
        folder: the URL.
        cache: where shards are kept.
        digests: SHA-256 of each shard by name, as far as they are known.
    """

    folder: RemoteFolder
    is_remote = True

    def __init__(self, folder: RemoteFolder, cache: ShardCache, digests: dict[str, str]) -> None:
        self.folder, self.cache, self.policy = folder, cache, folder.outages.policy
        self._digests = digests
        self._asked = False

    def open(self, entry: ShardEntry) -> OpenShard:
        """Open a shard in the cache, fetched first where it is not there.

        Raises:
            BadSample: the shard is gone, or comes damaged, or cannot be fetched.
            DataError: the cache cannot hold it, or nothing can be fetched any more.
        """
        return OpenShard(self.cache.open(self._file(entry)), entry.bytes)

    def rows(self, shards: ShardTable, wait: bool) -> np.ndarray | None:
        """Return the rows of all samples, fetched once and mapped into memory.

        Without `wait` they are fetched in the background, if they are few enough: a shard can be
        read without them, at the cost of its headers.

        Raises:
            ConfigError: they cannot be had, and are waited for.
        """
        file = CachedFile(self.folder, shards.file, table_bytes(shards.total))
        if not wait and not self.cache.holds(file):
            if not self._asked and file.bytes <= _SMALL_SHARE * self.cache.limit:
                self.cache.prefetch(file)
            self._asked = True
            return None
        try:
            handle = self.cache.open(file)
        except (BadSample, DataError) as error:
            raise ConfigError(f"{self.folder / shards.file}: {error}") from error
        # The handle stays open: as long as it is, the file stays in the cache.
        return map_samples(f"/proc/self/fd/{handle}", shards, check=wait)

    def prefetch(self, entry: ShardEntry) -> None:
        """Fetch a shard in the background."""
        self.cache.prefetch(self._file(entry))

    def when_full(self, release: Callable[[], object]) -> None:
        """Have it called when the cache is full."""
        self.cache.when_full(release)

    def _file(self, entry: ShardEntry) -> CachedFile:
        return CachedFile(self.folder, entry.name, entry.bytes, self._digests.get(entry.name))
