"""Shards: plain WebDataset tars, read in random order through their index.

A sample is `KEY.jpg|jpeg|png|webp` with `KEY.txt` and/or `KEY.json`, and optionally a second image
`KEY.1.jpg`. Without the index's rows of samples, the headers of a tar are read once.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from vlp.config import ConfigError
from vlp.data.schema import Annotation
from vlp.data.shards.index import (
    INDEX_NAME,
    LRUCache,
    ShardEntry,
    ShardTable,
    index_folder,
    map_samples,
    no_shards_in,
    read_table,
    sample_rows,
    table_bytes,
)
from vlp.data.shards.remote import (
    DEFAULT_OUTAGES,
    CachedFile,
    OutageConfig,
    RemoteFolder,
    ShardCache,
    is_url,
)
from vlp.data.shards.sample_files import (
    BadSample,
    Contents,
    DataError,
    RawSample,
    Reader,
    SampleFiles,
    ShardFile,
    outage_error,
    parse,
    parse_annotation,
)
from vlp.data.shards.shard_writer import ShardWriter
from vlp.data.shards.tar import BLOCK, open_tar

logger = logging.getLogger(__name__)

# Largest share of the cache for an index's rows of samples, which save the reading of headers.
_MAX_ROWS_SHARE = 0.01


class LocalFolder:
    """A local folder of shards; `policy`: `OutageConfig.policy`."""

    def __init__(self, folder: Path | RemoteFolder, policy: str) -> None:
        self.folder, self.policy = folder, policy

    def open(self, entry: ShardEntry) -> ShardFile:
        """Open a shard; OSError if too many files are open, else the policy's error."""
        path = self.folder / entry.name
        try:
            return ShardFile(open_tar(Path(path)), path, self.policy)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            bad = BadSample("missing shard", f"{path} ({error.strerror})")
            may_pass = error.errno not in (errno.ENOENT, errno.EINVAL)
            raise outage_error(bad, self.policy, may_pass) from error

    def rows(self, shards: ShardTable, wait: bool) -> np.ndarray | None:
        """Return the memory-mapped rows of all samples, with `wait` also checked; None: no file."""
        return map_samples(self.folder / shards.file, shards, check=wait)

    def prefetch(self, entry: ShardEntry) -> None:
        """Do nothing: the shard is local."""


class CachedFolder(LocalFolder):
    """Shards behind a URL, downloaded to the cache; `digests`: SHA-256 by name where known."""

    folder: RemoteFolder

    def __init__(self, folder: RemoteFolder, cache: ShardCache, digests: dict[str, str]) -> None:
        super().__init__(folder, folder.outages.policy)
        self.cache, self._digests = cache, digests
        self._is_requested = False

    def open(self, entry: ShardEntry) -> ShardFile:
        """Open a shard in the cache, downloaded first if missing."""
        handle = self.cache.open(self._file(entry))
        return ShardFile(handle, self.folder / entry.name, self.policy)

    def rows(self, shards: ShardTable, wait: bool) -> np.ndarray | None:
        """Return the memory-mapped rows; None without `wait` while they are not in the cache."""
        file = CachedFile(self.folder, shards.file, table_bytes(shards.total))
        if not wait and not self.cache.holds(file):
            if not self._is_requested and file.bytes <= _MAX_ROWS_SHARE * self.cache.limit:
                self.cache.prefetch(file)
                self._is_requested = True
            return None
        try:
            handle = self.cache.open(file)
        except (BadSample, DataError) as error:
            raise ConfigError(f"{self.folder / shards.file}: {error}") from error
        # The handle stays open, so that the cache does not evict the file.
        return map_samples(f"/proc/self/fd/{handle}", shards, check=wait)

    def prefetch(self, entry: ShardEntry) -> None:
        """Download a shard in the background."""
        self.cache.prefetch(self._file(entry))

    def _file(self, entry: ShardEntry) -> CachedFile:
        return CachedFile(self.folder, entry.name, entry.bytes, self._digests.get(entry.name))


__all__ = ["Item", "Items", "ShardEntry", "ShardIndex", "ShardWriter", "index_folder"]

_MAX_SCANS = 1024  # shards with rows from a scan in memory, 10 bytes a sample
_MAX_OPEN_FILES = 128
_MAX_OPEN_CACHED = 2  # few, as no process can evict an open file from the cache

# Open files of all indices of the process. All are closed at a quarter of the system limit, as the
# process also has sockets and tensors of other processes, or when the system opens no more.
_OPEN: WeakSet[LRUCache[ShardFile]] = WeakSet()


def _close_all() -> None:
    for files in list(_OPEN):
        files.clear()


_ScanResult = tuple[np.ndarray, str | None]  # rows of samples, and the damage after the last row


class ShardIndex:
    """A folder of shards with random access; forked and spawned processes may use a copy."""

    def __init__(self, store: LocalFolder, shards: ShardTable) -> None:
        self._store = store
        self.folder = store.folder
        self.shards = shards
        # Index of each shard's first sample among the rows of all shards.
        self._first_samples = np.concatenate([[0], np.cumsum(shards.samples)])
        self._rows: np.ndarray | None = None
        self._rows_loaded = False
        self._scans: LRUCache[_ScanResult] = LRUCache(_MAX_SCANS)
        self._caption_ends: LRUCache[np.ndarray] = LRUCache(_MAX_SCANS)
        self._listings: LRUCache[Contents] = LRUCache(1)  # last scan of a shard with repeated keys
        max_open = _MAX_OPEN_CACHED if self.is_remote else _MAX_OPEN_FILES
        self._files: LRUCache[ShardFile] = LRUCache(max_open, dispose=ShardFile.close)
        _OPEN.add(self._files)
        if isinstance(store, CachedFolder):
            store.cache.on_full.append(self._files.clear)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        cache: ShardCache | None = None,
        outages: OutageConfig = DEFAULT_OUTAGES,
    ) -> ShardIndex:
        """Read the index of a folder or URL; shards of a URL are downloaded to `cache`."""
        if is_url(folder):
            return cls._open_remote(str(folder), cache, outages)
        folder = Path(folder)
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder of shards")
        remedy = f"index the folder with: vlp data index {folder}"
        path = folder / INDEX_NAME
        if not path.exists():
            if not any(folder.glob("*.tar")):
                raise ConfigError(no_shards_in(folder))
            raise ConfigError(f"{folder}: the shards have no {INDEX_NAME}; {remedy}")
        try:
            with path.open("rb") as file:
                shards = read_table(file, str(path), remedy)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
        with os.scandir(os.fsencode(folder)) as files:
            tars = [file.name for file in files if file.name.endswith(b".tar")]
        unknown = min(shards.unknown_names(tars), default=None)
        if unknown is not None:
            raise ConfigError(f"{path}: is out of date, without {os.fsdecode(unknown)}; {remedy}")
        # An index without any tar opens, for its numbers of samples; reading a sample then fails.
        if tars and len(tars) < len(shards) and outages.policy != "skip":
            missing = np.setdiff1d(shards.names, np.array(tars, dtype=shards.names.dtype))
            raise ConfigError(
                f"{folder}: {len(missing)} of {len(shards)} shards of its index are missing, "
                f"{missing[0].decode()} for one; restore them, or {remedy}; a pretraining can "
                "skip their samples: data.outages.policy=skip"
            )
        index = cls(LocalFolder(folder, outages.policy), shards)
        index._all_rows(wait=True)  # damaged rows raise here instead of later in a worker
        return index

    @classmethod
    def _open_remote(cls, url: str, cache: ShardCache | None, outages: OutageConfig) -> ShardIndex:
        if cache is None:
            raise ConfigError(
                f"{url}: shards of a URL need a cache on a local disk; set "
                "data.cache={folder: /scratch/shards, limit: 200GB}"
            )
        folder = RemoteFolder(url, outages)
        content = folder.read(INDEX_NAME)
        remedy = "index the folder on its host with: vlp data index FOLDER"
        if content is None:
            raise ConfigError(
                f"{url}: has no {INDEX_NAME}; {remedy}; or set data.epoch_samples and give the "
                "shards' URLs"
            )
        shards = read_table(BytesIO(content), f"{folder / INDEX_NAME}", remedy)
        return cls(CachedFolder(folder, cache, folder.digests(shards.names)), shards)

    def __len__(self) -> int:
        return self.shards.total

    def read(self, shard_number: int, sample_number: int) -> RawSample:
        """Return sample `sample_number` of a shard; raises BadSample (`sample_files.KINDS`)."""
        return parse(*self._find(shard_number, sample_number))

    def read_annotation(self, shard_number: int, sample_number: int) -> Annotation:
        """Return a sample's annotation; its images are not read. Raises as `read` does."""
        return parse_annotation(*self._find(shard_number, sample_number))

    def annotations(self) -> Iterator[Annotation | BadSample]:
        """Yield each sample's annotation in order, or its BadSample."""
        for shard_number, entry in enumerate(self.shards):
            for sample_number in range(entry.samples):
                try:
                    yield self.read_annotation(shard_number, sample_number)
                except BadSample as bad:
                    yield bad

    def caption_ends(self, shard_number: int) -> np.ndarray:
        """Return cumulative numbers of pairs, (samples,) int64; a sample has at least one pair."""

        def count() -> np.ndarray:
            rows = self.require_captions()
            start, stop = self._first_samples[shard_number : shard_number + 2]
            counts = rows["captions"][start:stop]
            return np.cumsum(np.maximum(counts, 1), dtype=np.int64)

        return self._caption_ends.get(shard_number, count)

    def require_captions(self) -> np.ndarray:
        """Return the rows (`vlp.data.shards.index.ROW`) of all samples; else ConfigError."""
        rows = self._all_rows(wait=True)
        if rows is None:
            raise ConfigError(
                f"{self.folder}: {self.shards.file} is missing, which `captions: all` needs; "
                "index the folder again: vlp data index FOLDER"
            )
        return rows

    @property
    def is_remote(self) -> bool:
        """Return whether the shards lie behind a URL."""
        return isinstance(self._store, CachedFolder)

    def prefetch(self, shard_number: int) -> None:
        """Download a shard in the background; nothing for a local folder."""
        self._store.prefetch(self.shards[shard_number])

    def _find(self, shard_number: int, sample_number: int) -> tuple[SampleFiles, Reader, str]:
        """Return a sample's files, their reader, and their location for messages."""
        entry = self.shards[shard_number]
        if not 0 <= sample_number < entry.samples:
            raise IndexError(f"{entry.name} has {entry.samples} samples, none at {sample_number}")
        sample_name = f"sample {sample_number}"
        try:
            file = self._file(shard_number, entry)
            rows, problem = self._sample_rows(shard_number, entry, file)
            if sample_number >= len(rows):
                reason = problem or "it holds fewer samples than its index says"
                raise BadSample("corrupt shard", f"{file.path}, {sample_name} ({reason})")
            start, blocks, _ = (int(part) for part in rows[sample_number])
            if blocks:
                (samples, problem, _), read = file.samples_at(start * BLOCK, blocks * BLOCK)
            else:  # only a scan of the shard shows whether an earlier sample has the key
                listed = self._listings.get(shard_number, file.list_samples)
                (samples, problem, _), read = listed, file.content
                samples = samples[sample_number : sample_number + 1]
        except OSError as error:
            where = f"{self.folder / entry.name}, {sample_name}"
            bad = BadSample("missing shard", f"{where} ({error.strerror or error})")
            raise outage_error(bad, self._store.policy) from error
        if len(samples) != 1 or (blocks and problem):
            reason = problem or "the index belongs to another shard; index the folder again"
            raise BadSample("corrupt shard", f"{file.path}, {sample_name} ({reason})")
        return samples[0], read, file.where(samples[0])

    def _file(self, shard_number: int, entry: ShardEntry) -> ShardFile:
        def open_shard() -> ShardFile:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # below 0: unlimited
            if 0 <= limit <= 4 * sum(map(len, _OPEN)):
                _close_all()
            try:
                return self._store.open(entry)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
            _close_all()
            return self._store.open(entry)

        return self._files.get(shard_number, open_shard)

    def _sample_rows(self, number: int, entry: ShardEntry, file: ShardFile) -> _ScanResult:
        def scan() -> _ScanResult:
            samples, problem, _ = file.list_samples()
            if (excess := len(samples) - entry.samples) > 0:
                message = "%s: holds %d samples that its index lacks; index the folder again"
                logger.warning(message, file.path, excess)
            return sample_rows(samples, [0] * len(samples)), problem

        # A shard of another length than in the index was rewritten: its rows are out of date.
        rows = self._all_rows(wait=False) if file.bytes == entry.bytes else None
        if rows is None:
            return self._scans.get(number, scan)
        start, stop = self._first_samples[number : number + 2]
        return rows[start:stop], None

    def _all_rows(self, wait: bool) -> np.ndarray | None:
        if self._rows is None and (self.is_remote or not self._rows_loaded):
            self._rows = self._store.rows(self.shards, wait)
            self._rows_loaded = True
        return self._rows

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self._store, "shards": self.shards}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["store"], state["shards"])  # type: ignore[misc]


class Item(NamedTuple):
    """Item `part` (from 0) of a sample, such as a question."""

    raw: RawSample
    part: int

    @property
    def where(self) -> str:
        """Location of the sample, for messages."""
        return self.raw.where

    def without_images(self) -> Item:
        """Return a copy without images, to free memory after decoding."""
        return self._replace(raw=self.raw._replace(image=b"", second_image=None))


class Items:
    """Map-style data set of the items of shard folders in order, at most `limit`.

    `parts` counts a sample's items given its annotation; without it a sample is an item.
    """

    def __init__(
        self,
        folders: Sequence[str | Path],
        parts: Callable[[Annotation], int] | None = None,
        limit: int | None = None,
    ) -> None:
        if not folders:
            raise ConfigError("no shard folder is given")
        if limit is not None and limit < 1:
            raise ConfigError(f"limit {limit}: at least one item is needed")
        self.folders = tuple(str(folder) for folder in folders)
        self.indices = [ShardIndex.open(folder) for folder in folders]
        self._shards = [
            (folder, number)
            for folder, index in enumerate(self.indices)
            for number in range(len(index.shards))
        ]
        samples = np.concatenate([index.shards.samples for index in self.indices])
        self._first_samples = np.concatenate([[0], np.cumsum(samples, dtype=np.int64)])
        # Cumulative numbers of items of the samples; None: a sample is an item.
        self._item_ends: np.ndarray | None = None
        if parts is not None:
            # A bad annotation counts as one item, so that evaluations count it as skipped.
            counts = [
                parts(annotation) if isinstance(annotation, Annotation) else 1
                for index in self.indices
                for annotation in index.annotations()
            ]
            self._item_ends = np.cumsum(counts, dtype=np.int64)
        total = int(self._first_samples[-1])
        if total and self._item_ends is not None:
            total = int(self._item_ends[-1])
        if not total:
            raise ConfigError(
                f"{', '.join(self.folders)}: there is nothing to read in these shards"
            )
        self._length = total if limit is None else min(limit, total)

    def __len__(self) -> int:
        return self._length

    def read(self, number: int) -> Item:
        """Read one item; raises BadSample for an unreadable sample."""
        folder, shard, sample, part = self.locate(number)
        return Item(self.indices[folder].read(shard, sample), part)

    def locate(self, number: int) -> tuple[int, int, int, int]:
        """Return (folder, shard, sample, part) of an item."""
        if not 0 <= number < self._length:
            raise IndexError(f"there are {self._length} items, none at {number}")
        sample, part = number, 0
        if self._item_ends is not None:
            sample = int(np.searchsorted(self._item_ends, number, side="right"))
            part = number - (int(self._item_ends[sample - 1]) if sample else 0)
        position = int(np.searchsorted(self._first_samples, sample, side="right")) - 1
        return *self._shards[position], sample - int(self._first_samples[position]), part
