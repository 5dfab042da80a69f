from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from benchmark_files import tar_of

from data_tools.originals import Originals, unpacked
from vlp.config import ConfigError

FILES = {"a/one.jpg": b"1" * 700, "two.jpg": b"2", "../three.jpg": b"3" * 512}


@pytest.mark.parametrize("kind", ["xz", "gz", "bz2"])
def test_compressed_tars_become_places(tmp_path: Path, kind: str) -> None:
    # Told by its bytes, not by its name.
    archive = tar_of(tmp_path / "images.bin", FILES, f"w:{kind}")
    room = tmp_path / "deep" / "room"
    with unpacked([archive], room) as places:
        found = Originals(places)
        assert {name: found.read(name) for name in FILES} == FILES
        assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "images.bin"]
    assert not room.exists()


def test_other_places_stay_and_folders_bring_their_archives(tmp_path: Path) -> None:
    plain = tar_of(tmp_path / "plain.tar", {"p.jpg": b"p"})
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "loose.jpg").write_bytes(b"loose")
    tar_of(folder / "x.tar.xz", {"x.jpg": b"x"}, "w:xz")
    tar_of(folder / "y.tgz", {"y.jpg": b"y"}, "w:gz")
    with unpacked([plain, folder, tmp_path / "nowhere"], tmp_path / "room") as places:
        assert places[:2] == [plain, folder]
        assert places[-1] == tmp_path / "nowhere"
        found = Originals(places[:-1])
        names = ("p.jpg", "loose.jpg", "x.jpg", "y.jpg")
        assert [found.read(name) for name in names] == [b"p", b"loose", b"x", b"y"]


def test_two_archives_of_one_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        tar_of(tmp_path / name / "images.tar.gz", {f"{name}.jpg": name.encode()}, "w:gz")
    archives = [tmp_path / name / "images.tar.gz" for name in ("a", "b")]
    with unpacked(archives, tmp_path / "room") as places:
        found = Originals(places)
        assert (found.read("a.jpg"), found.read("b.jpg")) == (b"a", b"b")


def test_what_a_killed_run_left_goes(tmp_path: Path) -> None:
    leftover = tmp_path / ".unpacked-abc"
    leftover.mkdir()
    (leftover / "half.tar").write_bytes(b"half")
    (tmp_path / "shard-000000.tar").write_bytes(b"")
    with unpacked([], tmp_path) as places:
        assert places == []
        assert not leftover.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["shard-000000.tar"]


@pytest.mark.parametrize("kind", ["xz", "gz", "bz2"])
@pytest.mark.parametrize("harm", ["cut", "changed"])
def test_damaged_archives(tmp_path: Path, kind: str, harm: str) -> None:
    archive = tar_of(tmp_path / f"images.tar.{kind}", FILES, f"w:{kind}")
    data = bytearray(archive.read_bytes())
    if harm == "cut":
        del data[-20:]
    else:
        data[len(data) // 2] ^= 0xFF
    archive.write_bytes(data)
    with (
        pytest.raises(ConfigError, match=rf"images\.tar\.{kind}: .*(damaged|cannot be unpacked)"),
        unpacked([archive], tmp_path / "room"),
    ):
        raise AssertionError("a damaged archive was taken for a whole one")
    assert not (tmp_path / "room").exists()


def test_the_plain_tar_is_the_compressed_one(tmp_path: Path) -> None:
    archive = tar_of(tmp_path / "images.tar.xz", FILES, "w:xz")
    with unpacked([archive], tmp_path / "room") as [plain], tarfile.open(plain, "r:") as opened:
        assert opened.getnames() == list(FILES)
