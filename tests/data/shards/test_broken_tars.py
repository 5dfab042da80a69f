"""Tars with every trick of the format: what they hold plainly is read, the rest is counted."""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from broken_shards import (
    FINE,
    GOOD,
    JSON,
    PNG,
    change_index,
    found,
    index_columns,
    member,
    pax,
    tar,
)

from vlp.config import ConfigError
from vlp.data.shards.remote import OutageConfig
from vlp.data.shards.sample_files import BadSample, DataError
from vlp.data.shards.shard_reader import ShardIndex, index_folder
from vlp.data.shards.tar import Member, read_members


def problem_of(path: Path, content: bytes) -> tuple[list[str], str | None]:
    path.write_bytes(content)
    members, problem = read_members(path)
    return [one.name for one in members], problem


@pytest.mark.parametrize(
    "trick",
    [
        member("a.png", b"", b"2", b"/etc/passwd"),
        member("a.png", b"", b"1", b"good.png"),
        member("a.png", b"", b"1", b"../../outside.png"),
        member("a.png", b"", b"3"),
        member("a.png", b"", b"4"),
        member("a.png", b"", b"5"),
        member("a.png", b"", b"6"),
        member("a.tar", tar(GOOD)),
        member("a.png", PNG, b"S"),
        pax({"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9999"})
        + member("a.png", b"1\n0\n512\n".ljust(512, b"\0") + bytes(512)),
        pax({"GNU.sparse.map": "0,512", "GNU.sparse.size": "4096"}) + member("a.png", bytes(512)),
        member("a.png/", b""),
        member("a.gif", PNG),
        b"",
    ],
    ids=[
        "symlink",
        "hardlink",
        "outside",
        "device",
        "block",
        "folder",
        "pipe",
        "tar",
        "sparse",
        "pax-sparse",
        "old-pax-sparse",
        "slash",
        "gif",
        "nothing",
    ],
)
def test_what_is_no_plain_image_is_a_missing_one(tmp_path: Path, trick: bytes) -> None:
    content = tar(GOOD, trick, member("a.json", JSON), member("b.png", PNG))
    assert found(tmp_path, content) == ["good", "missing image", "b"]


@pytest.mark.parametrize("kind", [b"0", b"\0", b"7"])
def test_the_three_kinds_of_plain_files(tmp_path: Path, kind: bytes) -> None:
    assert found(tmp_path, tar(member("a.png", PNG, kind), member("a.json", JSON, kind))) == ["a"]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (b"../../outside.png", "../../outside"),
        (b"/etc/passwd.png", "/etc/passwd"),
        (b"./a.png", "./a"),
        (b"folder.with.dots/a.png", "folder.with.dots/a"),
        (b"A.PNG", "A"),
        (b"caf\xe9.png", r"caf\xe9"),
        ("größe 寸法.png".encode(), "größe 寸法"),
        (b"two\nlines\x1b[31m.png", r"two\x0alines\x1b[31m"),
        (b"%s{}.png", "%s{}"),
    ],
)
def test_names_are_labels_and_never_paths(tmp_path: Path, name: bytes, key: str) -> None:
    assert found(tmp_path, tar(member(name, PNG), GOOD)) == [key, "good"]
    key.encode()


def test_nothing_outside_of_the_folder_is_opened(tmp_path: Path) -> None:
    outside = tmp_path / "outside.png"
    outside.write_bytes(PNG)
    folder = tmp_path / "folder"
    folder.mkdir()
    assert found(folder, tar(GOOD)) == ["good"]  # what Python imports at first use is there
    opened: list[str] = []
    watching = True

    def watch(event: str, arguments: tuple) -> None:
        if watching and event == "open":
            opened.append(os.path.abspath(os.fsdecode(arguments[0])))

    sys.addaudithook(watch)
    content = tar(
        member("../outside.png", b"", b"1", b"../outside.png"),
        member("a.png", b"", b"2", str(outside).encode()),
        member("a.json", JSON),
        member("../outside.json", JSON),
        member(str(outside), PNG),
    )
    assert found(folder, content) == ["missing image", "missing image", str(outside)[:-4]]
    watching = False
    assert opened
    assert all(path.startswith(str(folder)) for path in opened), opened


@pytest.mark.parametrize("name", ["../outside.tar", "/etc/passwd", "a/0.tar", "", "\0.tar"])
def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert found(folder, tar(GOOD)) == ["good"]
    (tmp_path / "outside.tar").write_bytes(tar(GOOD))
    assert index_columns(folder)["name"].tolist() == [b"0.tar"]
    change_index(folder, name=np.array([name.encode()]))
    with pytest.raises(ConfigError, match=r"index\.npz"):
        ShardIndex.open(folder)


def test_samples_of_one_key(tmp_path: Path) -> None:
    again = member("a.png", PNG) + member("a.json", JSON)
    assert found(tmp_path, tar(again, again)) == ["a", "duplicate key"]
    assert found(tmp_path, tar(again, GOOD, again)) == ["a", "good", "duplicate key"]
    assert found(tmp_path, tar(again, member("a.PNG", PNG))) == ["a", "duplicate key"]
    # All images first: no reader of WebDataset finds the samples together.
    names = [member(f"{key}.png", PNG) for key in "abc"] + [member("b.json", JSON)]
    assert found(tmp_path, tar(*names)) == ["a", "b", "c", "duplicate key"]
    with pytest.raises(BadSample, match=r"0\.tar, b \(came before; .*must follow each other"):
        ShardIndex.open(tmp_path).read(0, 3)


def test_samples_without_their_other_half(tmp_path: Path) -> None:
    content = tar(
        member("a.json", JSON),
        member("b.txt", b"text"),
        member("c.png", PNG),
        member("README", b""),
    )
    assert found(tmp_path, content) == ["missing image", "missing image", "c"]
    index = ShardIndex.open(tmp_path)
    assert index.read(0, 2).annotation.caption is None


def test_long_names_of_both_kinds(tmp_path: Path) -> None:
    long = "folder/" * 30 + "a" * 200
    gnu = member("././@LongLink", f"{long}.png\0".encode(), b"L") + member("cut.png", PNG)
    assert found(tmp_path, tar(gnu, GOOD)) == [long, "good"]
    named = pax({"path": f"{long}.png", "comment": "x" * 5000}) + member("cut.png", PNG)
    assert found(tmp_path, tar(named, GOOD)) == [long, "good"]
    everywhere = pax({"comment": "all"}, b"g")
    assert found(tmp_path, tar(everywhere, GOOD)) == ["good"]


def test_content_behind_the_end_is_not_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    one, two = tar(GOOD) + bytes(8192), tar(FINE)
    names, problem = problem_of(path, one + two)
    assert names == ["good.png", "good.json"]
    assert problem == f"more content behind its end at byte {len(GOOD)}"
    assert problem_of(path, one) == (names, None)
    # A hole of a crash: blocks of zeros where a header should be.
    _, problem = problem_of(path, GOOD + bytes(4096) + two)
    assert problem == f"more content behind its end at byte {len(GOOD)}"


def test_a_compressed_tar_or_none_at_all(tmp_path: Path) -> None:
    for content in (gzip.compress(tar(GOOD)), b"<html>404</html>" * 99, b"x", bytes(511), PNG):
        names, problem = problem_of(tmp_path / "0.tar", content)
        assert names == []
        assert problem
    assert found(tmp_path, b"<html>") == []


@pytest.mark.parametrize("kind", ["folder", "pipe", "nowhere", "loop"])
def test_what_is_called_a_shard_but_is_no_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "0.tar"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / ("gone" if kind == "nowhere" else "0.tar"))
    with pytest.raises(ConfigError, match=r"0\.tar: cannot read this shard"):
        index_folder(tmp_path)


@pytest.mark.parametrize("kind", ["folder", "pipe", "nowhere"])
def test_a_shard_that_becomes_no_file(tmp_path: Path, kind: str) -> None:
    assert found(tmp_path, tar(GOOD)) == ["good"]
    path = tmp_path / "0.tar"
    index = ShardIndex.open(tmp_path)
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(DataError, match="missing shard"):
        index.read(0, 0)
    if kind != "nowhere":
        with pytest.raises(BadSample, match="missing shard"):
            ShardIndex.open(tmp_path, outages=OutageConfig(policy="skip")).read(0, 0)


def test_members_lie_where_they_are_said_to(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(tar(pax({"comment": "x"}) + member("a.png", PNG), GOOD))
    data = path.read_bytes()
    members, problem = read_members(path)
    assert problem is None
    assert [data[one.offset : one.offset + one.size] for one in members] == [PNG, PNG, JSON]
    assert members[2] == Member("good.json", data.index(JSON), len(JSON))
