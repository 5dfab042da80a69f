"""Sizes that a tar cannot have, or should not: no time and no memory is spent on them."""

from __future__ import annotations

import gzip
import io
import os
import time
import tracemalloc
from pathlib import Path

import pytest
from broken_shards import END, FINE, GOOD, JSON, PNG, checked, found, header, member, pax, tar

from vlp.config import ConfigError
from vlp.data.limits import MAX_ANNOTATION_BYTES, MAX_IMAGE_BYTES
from vlp.data.shards.shard_reader import ShardIndex, index_folder
from vlp.data.shards.tar import read_members, stored_files

SIZES = {
    "beyond the end": header("b.png", 10**9),
    "beyond any file": header("b.png", 2**60),
    "beyond any number of the machine": header("b.png", 2**80),
    "negative": header("b.png", -1),
    "back to the first header": header("b.png", -len(GOOD + FINE) - 512),
    "back to an earlier header": header("b.png", -len(FINE) - 512),
    "back to its own header": header("b.png", -512),
    "no number": header("b.png", 0, size_field=b"12x45678901\0"),
    "pax, no number": pax({"size": "all"}) + header("b.png", 2**33),
    "pax, negative": pax({"size": "-5000"}) + member("b.png", PNG),
    "pax, beyond": pax({"size": "9" * 30}) + member("b.png", PNG),
    "pax header of a terabyte": header("b", 2**40, b"x"),
    "pax header of less than nothing": header("b", -512, b"x"),
    "pax header without an end": header("b", 600, b"x") + b"9" * 1024,
    "pax header of digits": member("b", b"9" * 8000, b"x"),
    "pax records longer than they are": member("b", b"999 path=b.png\n", b"x") + member("b", PNG),
    "long name of a terabyte": header("b", 2**40, b"L"),
    "long name of less than nothing": header("b", -4096, b"L"),
    "long names one behind another": member("b", b"b.png\0", b"L") * 3000,
    "extended headers one behind another": pax({"comment": "b"}) * 3000,
    "sparse with a map of many blocks": checked(header("b.png", 512, b"S")[:482] + b"\1" * 30)
    + b"\1" * 512 * 200,
    "sparse map of many": pax({"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})
    + member("b.png", b"999999999999\n" + b"1\n" * 40000),
    "unknown kind beyond the end": header("b.png", 10**9, b"~"),
    "multi-volume": header("b.png", 10**9, b"M"),
}


@pytest.mark.parametrize("name", SIZES)
def test_absurd_sizes_cost_neither_time_nor_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(GOOD + FINE + SIZES[name] + END)
    tracemalloc.start()
    started = time.process_time()
    members, _ = read_members(path)
    seconds = time.process_time() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [one.name for one in members[:4]] == ["good.png", "good.json", "fine.png", "fine.json"]
    assert len(members) < 10
    assert all(one.offset + one.size <= path.stat().st_size for one in members)
    assert peak < 2_000_000
    assert seconds < 2
    index_folder(tmp_path)
    index = ShardIndex.open(tmp_path)
    assert [index.read(0, number).key for number in range(2)] == ["good", "fine"]


def test_headers_that_lie_are_named(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    for name in ("beyond the end", "back to its own header", "pax header of a terabyte"):
        path.write_bytes(GOOD + SIZES[name] + END)
        members, problem = read_members(path)
        assert [one.name for one in members] == ["good.png", "good.json"]
        assert problem, name
    [line] = index_folder(tmp_path)
    assert line.startswith("0.tar: not a readable tar from here on (")
    assert "1 samples before it" in line


def sparse_file(path: Path, *parts: tuple[bytes, int]) -> None:
    """Headers, each with so many bytes behind it that take no room on the disk."""
    with open(path, "wb") as file:
        for content, gap in parts:
            file.write(content)
            file.seek(gap + -gap % 512, os.SEEK_CUR)
        file.write(END)


@pytest.mark.parametrize(
    ("parts", "result"),
    [
        (
            [(header("a.png", 3 * 2**30), 3 * 2**30), (member("a.json", JSON), 0)],
            "image too large",
        ),
        (
            [
                (member("a.png", PNG), 0),
                (header("a.1.png", MAX_IMAGE_BYTES + 1), MAX_IMAGE_BYTES + 1),
            ],
            "image too large",
        ),
        ([(member("a.png", PNG), 0), (header("a.json", 2**31), 2**31)], "bad annotation"),
        (
            [
                (member("a.png", PNG), 0),
                (header("a.txt", MAX_ANNOTATION_BYTES + 1), MAX_ANNOTATION_BYTES + 1),
            ],
            "bad annotation",
        ),
        (
            [
                (member("a.png", PNG), 0),
                (header("a.mp4", 5 * 2**30), 5 * 2**30),
                (member("a.json", JSON), 0),
            ],
            "a",
        ),
        (
            [
                (member("a.png", PNG), 0),
                (header("README", 5 * 2**30), 5 * 2**30),
                (member("a.json", JSON), 0),
            ],
            "a",
        ),
    ],
    ids=["image", "second", "json", "txt", "film", "between"],
)
def test_files_of_gigabytes_are_not_read(
    tmp_path: Path, parts: list[tuple[bytes, int]], result: str
) -> None:
    sparse_file(tmp_path / "0.tar", *parts)
    tracemalloc.start()
    assert found(tmp_path, None) == [result]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16_000_000


def test_files_beyond_the_limit_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(GOOD + FINE + END)
    members, problem = read_members(path, 3)
    assert (len(members), problem) == (3, "more than 3 files")
    members, problem = read_members(path, 4)
    assert (len(members), problem) == (4, None)


@pytest.mark.parametrize("name", ["negative", "back to its own header", "beyond the end"])
def test_small_tars_held_in_memory_refuse_them_too(tmp_path: Path, name: str) -> None:
    path = tmp_path / "small.tar"
    path.write_bytes(GOOD + SIZES[name] + END)
    with pytest.raises(ConfigError, match=r"small\.tar: not a tar file that can be read"):
        list(stored_files(path, lambda name: True))


def test_small_tars_hold_plain_files_and_no_floods(tmp_path: Path) -> None:
    path = tmp_path / "small.tar"
    link = member("a.png", b"", b"2", b"/etc/passwd")
    path.write_bytes(gzip.compress(tar(GOOD, link)))
    assert [name.name for name, _ in stored_files(path, lambda name: True)] == [
        "good.png",
        "good.json",
    ]
    flood = io.BytesIO()
    with gzip.GzipFile(fileobj=flood, mode="wb", compresslevel=1) as file:
        file.write(header("a.png", 2**30))
        file.write(bytes(2**20))
    path.write_bytes(flood.getvalue())
    with pytest.raises(ConfigError, match=r"a\.png is said to hold 1073741824 bytes"):
        list(stored_files(path, lambda name: True))
