"""The index of a folder of shards: two files that any number of processes share.

`index.npz` holds a row per shard (20 to 40 MB for a million shards) and the name of the other file.
`samples-HASH.npy`, named after its content, holds ten bytes per sample and is memory-mapped.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from io import BytesIO
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import IO, Generic, NamedTuple, TypeVar
from zipfile import ZIP_STORED, ZipFile

import numpy as np
from numpy.typing import ArrayLike

from vlp.config import ConfigError
from vlp.data.file_names import split_of
from vlp.data.shards.sample_files import SampleFiles, ShardFile
from vlp.data.shards.tar import BLOCK, escape_name, open_tar
from vlp.io import atomic_write


def smallest_ints(values: ArrayLike) -> np.ndarray:
    """Return non-negative numbers in the smallest signed integer type; NumPy sums them in int64."""
    # Signed, as NumPy makes floats of uint64 with signed integers: -1 - max needs the signed type
    # that holds max.
    numbers = np.asarray(values, dtype=np.int64)
    return numbers.astype(np.min_scalar_type(-1 - int(numbers.max(initial=0))))


INDEX_NAME = "index.npz"
INDEX_VERSION = 3
TABLE_GLOB = f"samples-{16 * '[0-9a-f]'}.npy"

# Bytes of a file of samples up to which its hash is checked: 27 million samples, under a second.
_MAX_CHECKED = 2**28

# First block and number of blocks (of 512 bytes) of a sample; 0 blocks: only a scan of the shard
# finds it.
ROW = np.dtype([("start", "<u4"), ("blocks", "<u4"), ("captions", "<u2")])


class ShardEntry(NamedTuple):
    """One shard of an index; `captions` counts all captions, `uncaptioned` samples without one."""

    name: str
    samples: int
    bytes: int
    captions: int
    uncaptioned: int


_NAME = re.compile(r"[^/\x00-\x1f\ud800-\udfff]+\.tar")  # surrogates: bytes that are not UTF-8
_TABLE_NAME = re.compile(rb"samples-[0-9a-f]+\.npy")
_ROWS_AT_ONCE = 2**13
_NAMES_AT_ONCE = 2**16

_MAX_NUMBER = 2**43  # in a column: sums over a million shards fit 64 bits


class ShardTable:
    """The shards of an index as columns of `ShardEntry`; `file` names the file of samples."""

    def __init__(self, columns: Mapping[str, ArrayLike], file: str) -> None:
        # Columns are (shards,): names in UTF-8, ascending; numbers narrow, as workers get a copy.
        names = np.asarray(columns["name"], dtype=np.bytes_)
        numbers = {name: smallest_ints(columns[name]) for name in ShardEntry._fields[1:]}
        self.columns = {"name": names, **numbers}
        self.names, self.samples, self.bytes, self.captions, self.uncaptioned = (
            self.columns.values()
        )
        self.file = file
        self.total = int(self.samples.sum())

    @classmethod
    def from_entries(cls, entries: Iterable[ShardEntry], file: str) -> ShardTable:
        """Return the table of entries in ascending order of names."""
        rows = list(entries)
        columns = {field: [getattr(row, field) for row in rows] for field in ShardEntry._fields}
        return cls(columns | {"name": [name.encode() for name in columns["name"]]}, file)

    @property
    def pairs(self) -> np.ndarray:
        """Number of (image, caption) pairs of each shard; a sample without captions is one."""
        return np.add(self.captions, self.uncaptioned, dtype=np.int64)

    def unknown_names(self, names: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the names that no shard has."""
        remaining = iter(names)
        while batch := list(islice(remaining, _NAMES_AT_ONCE)):
            # A search for ascending names is ten times as fast.
            ordered = np.sort(np.array(batch))
            left, right = (np.searchsorted(self.names, ordered, side) for side in ("left", "right"))
            yield from ordered[left == right].tolist()

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> ShardEntry:
        name, *numbers = (column[number] for column in self.columns.values())
        return ShardEntry(name.decode(), *map(int, numbers))

    def __iter__(self) -> Iterator[ShardEntry]:
        for start in range(0, len(self), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            for name, *numbers in zip(*(column[part].tolist() for column in self.columns.values())):
                yield ShardEntry(name.decode(), *numbers)


def read_table(file: IO[bytes], where: str, remedy: str) -> ShardTable:
    """Read `index.npz`; `where` and `remedy` are for messages."""
    try:
        with ZipFile(file) as archive:
            version = int(_read_array(archive, "version", "i", ()))
            if version == INDEX_VERSION:
                return _parse_table(archive)
    except Exception as error:  # archives and numpy's headers fail in many ways
        reason = shorten(str(error) or type(error).__name__, 200)
        raise ConfigError(f"{where}: not an index of shards ({reason}); {remedy}") from error
    age = "an older" if version < INDEX_VERSION else "a newer"
    raise ConfigError(
        f"{where}: an index of {age} version, {version} instead of {INDEX_VERSION}; {remedy}"
    )


def _parse_table(archive: ZipFile) -> ShardTable:
    file = bytes(_read_array(archive, "table", "S", ()))
    if not _TABLE_NAME.fullmatch(file):
        raise ValueError(f"table: {file!r}")
    names = _read_array(archive, "name", "S")
    columns = {"name": names}
    for field in ShardEntry._fields[1:]:
        numbers = columns[field] = _read_array(archive, field, "i", names.shape)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < _MAX_NUMBER:
            raise ValueError(f"{field}: numbers from {numbers.min()} to {numbers.max()}")
    for start in range(0, len(names), _ROWS_AT_ONCE):
        for name in names[start : start + _ROWS_AT_ONCE].tolist():
            if not _NAME.fullmatch(name.decode()):
                raise ValueError(f"name: {name!r}")
    if not (names[:-1] < names[1:]).all():
        raise ValueError("name: the names do not ascend")
    return ShardTable(columns, file.decode())


def _read_array(
    archive: ZipFile, name: str, kind: str, shape: tuple[int, ...] | None = None
) -> np.ndarray:
    """Return an array of the archive; without a `shape` it is a column of any length."""
    info = archive.getinfo(f"{name}.npy")
    if info.compress_type != ZIP_STORED:  # a small file could unpack to gigabytes
        raise ValueError(f"{name}: is compressed")
    with archive.open(info) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
    if array.dtype.kind != kind or array.ndim != (1 if shape is None else len(shape)):
        raise ValueError(f"{name}: {array.dtype} of shape {array.shape}")
    if shape not in (None, array.shape):
        raise ValueError(f"{name}: {len(array)} entries of {shape[0]} shards")
    return array


def map_samples(path: Path | str, table: ShardTable, check: bool = True) -> np.ndarray | None:
    """Map the rows of all samples into memory; None if the file is missing.

    `check` compares the content of files up to 256 MB with the hash in their name.
    """
    try:
        size = os.stat(path).st_size
        if size != table_bytes(table.total):
            raise ValueError(f"{size} bytes instead of {table_bytes(table.total)}")
        # An empty array cannot be mapped.
        rows = np.load(path, mmap_mode="r") if table.total else np.empty(0, ROW)
        if rows.dtype != ROW or rows.shape != (table.total,):
            raise ValueError(f"{rows.shape} rows of {rows.dtype}")
        if check and size <= _MAX_CHECKED and fnmatchcase(table.file, TABLE_GLOB):
            name = _table_name([rows])
            if name != table.file:
                raise ValueError(f"its content belongs to {name}")
    except FileNotFoundError:
        return None
    except Exception as error:  # numpy evaluates the header, which fails in many ways
        raise ConfigError(f"{path}: damaged ({error}); index the folder again") from error
    return rows.view(np.ndarray)


def sample_rows(samples: Sequence[SampleFiles], captions: Sequence[int]) -> np.ndarray:
    """Return the rows of a shard's samples, given their tar members and numbers of captions."""
    ends = [
        max(-(-(member.offset + member.size) // BLOCK) for member in sample.files.values())
        for sample in samples
    ]
    rows = rows_of(ends, captions)
    rows["blocks"][[sample.repeated for sample in samples]] = 0  # a scan will find the repetition
    return rows


def rows_of(ends: Sequence[int], captions: Sequence[int]) -> np.ndarray:
    """Return the rows of adjacent samples; `ends`: for each, the number of the next block."""
    stops = np.array(ends, dtype=np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), stops])[:-1]
    rows = np.empty(len(stops), dtype=ROW)
    rows["start"], rows["blocks"] = starts, stops - starts
    rows["blocks"][stops > np.iinfo("u4").max] = 0  # behind 2 TiB of a tar: not addressable
    rows["captions"] = np.minimum(captions, np.iinfo("u2").max)
    return rows


class SurveyedShard(NamedTuple):
    """A shard's name, length in bytes, and rows of samples."""

    name: str
    bytes: int
    rows: np.ndarray

    @property
    def entry(self) -> ShardEntry:
        """Return the shard's entry in the index."""
        captions = self.rows["captions"]
        return ShardEntry(
            self.name,
            len(captions),
            self.bytes,
            int(captions.sum(dtype=np.int64)),
            int((captions == 0).sum()),
        )


def write_index(folder: Path, shards: Sequence[SurveyedShard]) -> None:
    """Write both files of an index; concurrent readers see the old index or the new one."""
    table = _table_name(shard.rows for shard in shards)
    with atomic_write(folder / table, durable=True) as file:
        file.write(npy_header(ROW, (sum(len(shard.rows) for shard in shards),)))
        for shard in shards:
            file.write(shard.rows.tobytes())
    write_table(folder, (shard.entry for shard in shards), table)
    for old in (*folder.glob(TABLE_GLOB), *folder.glob(f"{TABLE_GLOB}.tmp")):  # .tmp: of a crash
        if old.name != table:
            old.unlink(missing_ok=True)


def write_table(folder: Path, entries: Iterable[ShardEntry], table: str) -> None:
    """Write `index.npz` alone; `table` is the name of the file of samples."""
    columns = ShardTable.from_entries(entries, table).columns
    with atomic_write(folder / INDEX_NAME, durable=True) as file:
        np.savez(file, version=INDEX_VERSION, table=np.bytes_(table), **columns)  # type: ignore[arg-type]


def _table_name(parts: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for rows in parts:
        digest.update(np.ascontiguousarray(rows).view(np.uint8).data)
    return f"samples-{digest.hexdigest()[:16]}.npy"


def table_bytes(samples: int) -> int:
    """Return the length in bytes of the file with the rows of `samples` samples."""
    return len(npy_header(ROW, (samples,))) + samples * ROW.itemsize


def npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the bytes of a .npy file before its data."""
    header = BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(
        header, {"descr": descr, "fortran_order": False, "shape": shape}
    )
    return header.getvalue()


def no_shards_in(folder: Path) -> str:
    """Return the message for a folder without shards; it names subfolders that hold shards."""
    inner = sorted({shard.parent.name for shard in folder.glob("*/*.tar")})
    hint = f"; name a subfolder that holds shards: {', '.join(inner[:6])}" if inner else ""
    return f"{folder}: holds no shards (*.tar){hint}"


def require_single_split(folder: Path | str, names: Iterable[str]) -> None:
    """Refuse shards of several splits by their names: `train-000.tar` and `val-000.tar`."""
    splits = {split_of(name): name for name in names}
    splits.pop(None, None)
    if len(splits) > 1:
        raise ConfigError(
            f"{folder}: by their names the shards are of several splits ("
            f"{', '.join(splits.values())}); put the shards of each split into a folder of its own"
        )


class Survey(NamedTuple):
    """A shard for the index, the keys of its samples, and the damage after the last sample."""

    shard: SurveyedShard
    keys: list[str]
    problem: str | None


def survey(path: Path) -> Survey:
    """Read a shard's headers and annotations; a bad annotation counts as no captions."""
    try:
        handle = open_tar(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this shard ({error.strerror})") from error
    with ShardFile(handle, path) as shard:
        samples, problem, _ = shard.list_samples()
        rows = sample_rows(samples, [shard.count_captions(sample) for sample in samples])
        surveyed = SurveyedShard(path.name, shard.bytes, rows)
        return Survey(surveyed, [sample.key for sample in samples], problem)


def index_folder(
    folder: str | Path,
    map_function: Callable[[Callable[[Path], Survey], Sequence[Path]], Iterable[Survey]] = map,
) -> list[str]:
    """Write a folder's index and return a message for each empty or damaged shard.

    `map_function` is `map` or a parallel one. The caller holds the folder's lock.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder of shards")
    paths = sorted(folder.glob("*.tar"))
    if not paths:
        raise ConfigError(no_shards_in(folder))
    require_single_split(folder, [path.name for path in paths])
    if invalid := [path for path in paths if not _NAME.fullmatch(path.name)]:
        raise ConfigError(
            f"{escape_name(f'{invalid[0]}')}: rename this shard; its name is not UTF-8, or holds "
            "control characters"
        )
    problems, shards = [], []
    try:
        for shard, _, problem in map_function(_without_keys, paths):
            if problem:
                problems.append(f"{shard.name}: {problem}, {len(shard.rows)} samples before it")
            elif not len(shard.rows):
                problems.append(f"{shard.name}: empty")
            shards.append(shard)
        write_index(folder, shards)
    except OSError as error:
        path = error.filename or folder / INDEX_NAME
        raise ConfigError(
            f"{path}: {error.strerror}; no index was written, solve this and run again"
        ) from error
    return problems


def _without_keys(path: Path) -> Survey:
    return survey(path)._replace(keys=[])


Value = TypeVar("Value")


class LRUCache(Generic[Value]):
    """LRU cache of at most `bound` values; evicted values go through `dispose`."""

    def __init__(self, bound: int, dispose: Callable[[Value], object] | None = None) -> None:
        self._bound = bound
        self._dispose = dispose
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the value of `key`, computed by `make` if missing."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = make()
        self._values[key] = value
        if len(self._values) > self._bound:
            _, oldest = self._values.popitem(last=False)
            if self._dispose is not None:
                self._dispose(oldest)
        return value

    def clear(self) -> None:
        """Dispose of every value."""
        while self._values:
            _, value = self._values.popitem()
            if self._dispose is not None:
                self._dispose(value)

    def __len__(self) -> int:
        return len(self._values)
