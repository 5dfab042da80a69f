"""The index of shards in columns: what it refuses, and what a million shards cost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from broken_shards import change_index

from vlp.config import ConfigError
from vlp.data.shards.index import ShardTable, write_table
from vlp.data.shards.shard_reader import ShardEntry, ShardIndex


@pytest.mark.parametrize("content", [b"", b"PK", b"{}", b"\x93NUMPY\x01\x00", b"[" * 100_000])
def test_what_is_no_index(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "index.npz").write_bytes(content)
    with pytest.raises(ConfigError, match=r"index\.npz: not an index.*data_tools index"):
        ShardIndex.open(tmp_path)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"version": None}, "not an index.*version"),
        ({"version": 2}, "an older version"),
        ({"version": 4, "samples": None}, "a newer version"),
        ({"version": [3]}, "version: int64 of shape"),
        ({"table": None}, "table"),
        ({"table": np.bytes_("../x.npy")}, "table: "),
        ({"table": "samples-0.npy"}, "table: <U13"),
        ({"samples": None}, "samples"),
        ({"name": np.array([b"../a.tar", b"b.tar"])}, "name: b'../a.tar'"),
        ({"name": np.array([b"", b"b.tar"])}, "name: b''"),
        ({"name": np.array([b"\xff.tar", b"b.tar"])}, "utf-8"),
        ({"name": np.array([b"b.tar", b"a.tar"])}, "do not ascend"),
        ({"name": np.array([b"a.tar", b"a.tar"])}, "do not ascend"),
        ({"bytes": [9, -9]}, "bytes: from -9 to 9"),
        ({"bytes": [9.0, 9.0]}, "bytes: float64"),
        ({"bytes": [9]}, "bytes: 1 of 2"),
        ({"bytes": np.array([9, 9], dtype=object)}, "allow_pickle"),
    ],
)
def test_an_index_that_cannot_be_used(
    make_shards: Callable[..., Path], changed: dict[str, Any], reason: str
) -> None:
    folder = make_shards(count=4, per_shard=2)
    change_index(folder, **changed)
    with pytest.raises(ConfigError, match=rf"index\.npz: .*{reason}.*data_tools index"):
        ShardIndex.open(folder)


def test_columns_hold_any_numbers_in_few_bytes() -> None:
    numbers = [0, 127, 128, 2**15, 2**31 - 1, 2**31, 2**42]
    for most in numbers:
        entries = [ShardEntry(f"{n}.tar", most, n, most, most) for n in range(2)]
        table = ShardTable.of(entries, "samples-0.npy")
        assert list(table) == entries
        assert table.total == 2 * most
        assert table.pairs.tolist() == [2 * most] * 2
        assert table.bytes.dtype == np.int8
    assert list(ShardTable.of([], "samples-0.npy")) == []


def test_names_that_no_shard_has() -> None:
    known = [f"{number:03d}.tar" for number in range(50)]
    entries = [ShardEntry(name, 1, 1, 1, 0) for name in known]
    names = [b"0123.tar", *map(str.encode, reversed(known)), b"", b"049.tar-and-more", b"a" * 255]
    table = ShardTable.of(entries, "samples-0.npy")
    assert sorted(table.unknown(names)) == sorted({*names}.difference(map(str.encode, known)))
    assert list(ShardTable.of([], "samples-0.npy").unknown(names[:2])) == sorted(names[:2])


_OPENED = """
import sys, time
from vlp.data.features.store import shards_sha256
from vlp.data.shards.shard_reader import ShardIndex

def peak():
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])

before, started = peak(), time.process_time()
index = ShardIndex.open(sys.argv[1])
seconds = time.process_time() - started
shards_sha256(index.shards)
print(len(index.shards), peak() - before, seconds)
"""


def test_an_index_of_many_shards_is_small_and_quick(tmp_path: Path) -> None:
    """A tenth of the bounds of a million shards: 50 MB and 2 s."""
    shards = 100_000
    entries = (ShardEntry(f"{n:08d}.tar", 1000, 30_000_000 + n, 5000, n % 3) for n in range(shards))
    write_table(tmp_path, entries, "samples-0.npy")
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", _OPENED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    opened, added, seconds = done.stdout.split()
    assert int(opened) == shards
    assert int(added) < 12_000_000  # as Python objects they are 70 MB
    assert float(seconds) < 0.2
