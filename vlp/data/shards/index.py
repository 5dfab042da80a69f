"""The index of a folder of shards: two files that any number of processes share.

`index.json` holds one row per shard, so it opens in time and memory for shards, not for samples.
`samples-HASH.npy` holds ten bytes per sample (where it lies and how many captions it has) and is
mapped into memory: what is not read costs nothing. The former names the latter by its content, so
that the two always belong together.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, ValidationError
from typing_extensions import TypedDict

from vlp.config import ConfigError
from vlp.data.shards.sample_files import SampleFiles
from vlp.io import atomic_write, write_text

INDEX_NAME = "index.json"
INDEX_VERSION = 2
TABLE_GLOB = f"samples-{16 * '[0-9a-f]'}.npy"
BLOCK = 512

# Bytes of a table that is read whole to check it: 27 million samples, a fraction of a second.
_MOST_CHECKED = 2**28

ROW = np.dtype([("start", "<u4"), ("blocks", "<u4"), ("captions", "<u2")])
"""One sample: its first block in the tar, its length in blocks of 512 bytes, its captions.

`blocks` is 0 where the sample cannot be read from its own bytes alone: its key came before, or it
is too long.
"""


class ShardEntry(NamedTuple):
    """One shard of an index: `captions` of all its samples, and samples that have none."""

    name: str
    samples: int
    bytes: int
    captions: int
    uncaptioned: int


# Sums of a million shards are 64-bit integers too.
_Count = Annotated[int, Field(ge=0, lt=2**43)]


class _Row(TypedDict):
    name: Annotated[str, Field(min_length=1, pattern=r"^[^/\x00-\x1f]+\.tar$")]
    samples: _Count
    bytes: _Count
    captions: _Count
    uncaptioned: _Count


class _Version(BaseModel):
    version: int


class _IndexFile(BaseModel):
    table: Annotated[str, Field(pattern=r"^samples-[0-9a-f]+\.npy$")]
    shards: list[_Row]


class ShardTable:
    """The shards of an index by number, in columns: small to hold and to send to workers.

    Made of columns by the names of `ShardEntry`, and the name of the file of samples. names:
    (shards,) UTF-8; samples, bytes, captions, uncaptioned: (shards,) int64.
    """

    def __init__(self, columns: Mapping[str, Sequence[Any]], file: str) -> None:
        self.names = np.array([name.encode() for name in columns["name"]], dtype=np.bytes_)
        self.samples, self.bytes, self.captions, self.uncaptioned = (
            np.array(columns[name], dtype=np.int64) for name in ShardEntry._fields[1:]
        )
        self.file = file
        self.total = int(self.samples.sum())

    @property
    def pairs(self) -> np.ndarray:
        """Elements of each shard when every caption is one; a sample without text is one too."""
        return self.captions + self.uncaptioned

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> ShardEntry:
        return ShardEntry(
            self.names[number].decode(),
            int(self.samples[number]),
            int(self.bytes[number]),
            int(self.captions[number]),
            int(self.uncaptioned[number]),
        )

    def __iter__(self) -> Iterator[ShardEntry]:
        return (self[number] for number in range(len(self)))


def read_table(content: bytes, where: str, remedy: str) -> ShardTable:
    """Return the shards that `index.json` names.

    Args:
        content: of the file.
        where: its name, for messages.
        remedy: what to do when it cannot be used, for messages.

    Raises:
        ConfigError: it is no index, or one of another version.
    """
    try:
        version = _Version.model_validate_json(content).version
        if version != INDEX_VERSION:
            kind = "an older" if version < INDEX_VERSION else "a newer"
            raise ConfigError(
                f"{where}: an index of {kind} version ({version}, this is {INDEX_VERSION}); "
                f"{remedy}"
            )
        found = _IndexFile.model_validate_json(content)
    except ValidationError as error:
        problem = error.errors()[0]
        place = "".join(f"{part}: " for part in problem["loc"])
        raise ConfigError(
            f"{where}: not an index of shards ({place}{problem['msg']}); {remedy}"
        ) from error
    rows = found.shards
    names = ShardEntry._fields
    columns = {name: [row[name] for row in rows] for name in names}  # type: ignore[literal-required]
    return ShardTable(columns, found.table)


def map_samples(path: Path | str, table: ShardTable, check: bool = True) -> np.ndarray | None:
    """Return the rows of all samples, mapped into memory; None when there is no such file.

    With `check` its content must be that of its name, unless it is too long to be read for that.

    Raises:
        ConfigError: it is damaged.
    """
    try:
        size = os.stat(path).st_size
        if size != table_bytes(table.total):
            raise ValueError(f"of {size} bytes, not {table_bytes(table.total)}")
        # An empty file cannot be mapped.
        rows = np.load(path, mmap_mode="r") if table.total else np.empty(0, ROW)
        if rows.dtype != ROW or rows.shape != (table.total,):
            raise ValueError(f"{rows.shape} rows of {rows.dtype}")
        if check and size <= _MOST_CHECKED and fnmatchcase(table.file, TABLE_GLOB):
            name = _table_name([rows])
            if name != table.file:
                raise ValueError(f"its content is that of {name}")
    except FileNotFoundError:
        return None
    except Exception as error:  # numpy reads a header as Python, which fails in many ways
        raise ConfigError(f"{path}: damaged ({error}); index the folder again") from error
    return rows.view(np.ndarray)


def sample_rows(samples: Sequence[SampleFiles], captions: Sequence[int]) -> np.ndarray:
    """Return the rows of a shard's samples from what its headers say."""
    ends = [
        max(-(-(member.offset + member.size) // BLOCK) for member in sample.files.values())
        for sample in samples
    ]
    rows = rows_of(ends, captions)
    rows["blocks"][[sample.repeated for sample in samples]] = 0
    return rows


def rows_of(ends: Sequence[int], captions: Sequence[int]) -> np.ndarray:
    """Return the rows of samples that lie one after another, given the block behind each one."""
    stops = np.array(ends, dtype=np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), stops])[:-1]
    rows = np.empty(len(stops), dtype=ROW)
    rows["start"], rows["blocks"] = starts, stops - starts
    rows["blocks"][stops > np.iinfo("u4").max] = 0  # behind the first 2 TiB of a tar
    rows["captions"] = np.minimum(captions, np.iinfo("u2").max)
    return rows


class SurveyedShard(NamedTuple):
    """A shard as it was found: its name, length in bytes, and rows of samples."""

    name: str
    bytes: int
    rows: np.ndarray

    @property
    def entry(self) -> ShardEntry:
        """Return its entry in the index."""
        captions = self.rows["captions"]
        return ShardEntry(
            self.name,
            len(captions),
            self.bytes,
            int(captions.sum(dtype=np.int64)),
            int((captions == 0).sum()),
        )


def write_index(folder: Path, shards: Sequence[SurveyedShard]) -> None:
    """Write both files; who opens the folder meanwhile finds the old ones or the new ones."""
    table = _write_samples(folder, shards)
    write_table(folder, (shard.entry for shard in shards), table)
    for old in (*folder.glob(TABLE_GLOB), *folder.glob(f"{TABLE_GLOB}.tmp")):  # killed at it
        if old.name != table:
            old.unlink(missing_ok=True)


def write_table(folder: Path, entries: Iterable[ShardEntry], table: str) -> None:
    """Write `index.json` alone, given the name of the file of samples that belongs to it."""
    rows = [json.dumps(entry._asdict(), separators=(",", ":")) for entry in entries]
    head = f'{{"version":{INDEX_VERSION},"table":"{table}","shards":['
    write_text(folder / INDEX_NAME, head + "\n" + ",\n".join(rows) + "\n]}\n", durable=True)


def _write_samples(folder: Path, shards: Sequence[SurveyedShard]) -> str:
    name = _table_name(shard.rows for shard in shards)
    with atomic_write(folder / name, durable=True) as file:
        file.write(_rows_header(sum(len(shard.rows) for shard in shards)))
        for shard in shards:
            file.write(shard.rows.tobytes())
    return name


def _table_name(parts: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for rows in parts:
        digest.update(np.ascontiguousarray(rows).view(np.uint8).data)
    return f"samples-{digest.hexdigest()[:16]}.npy"


def table_bytes(samples: int) -> int:
    """Return the length of the file that holds the rows of so many samples."""
    return len(_rows_header(samples)) + samples * ROW.itemsize


def _rows_header(samples: int) -> bytes:
    header = BytesIO()
    descr = np.lib.format.dtype_to_descr(ROW)
    np.lib.format.write_array_header_1_0(
        header, {"descr": descr, "fortran_order": False, "shape": (samples,)}
    )
    return header.getvalue()


def no_shards_in(folder: Path) -> str:
    """Say that a folder holds no shards, and which of its subfolders do."""
    inner = sorted({shard.parent.name for shard in folder.glob("*/*.tar")})
    hint = f"; name one of its subfolders that do: {', '.join(inner[:6])}" if inner else ""
    return f"{folder}: holds no shards (*.tar){hint}"
