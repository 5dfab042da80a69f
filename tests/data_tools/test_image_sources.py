from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest
from benchmark_files import tar_of

from data_tools.originals import Originals
from vlp.config import ConfigError
from vlp.data.shards.sample_files import BadSample


def test_folders_two_levels_deep(tmp_path: Path) -> None:
    for name in ("a.jpg", "ab/b.jpg", "ab/cd/c.jpg", "ab/cd/ef/deep.jpg", ".hidden.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "a.txt").write_text("a caption beside the image")
    originals = Originals([tmp_path])
    assert originals.read("a.jpg") == b"a.jpg"
    assert originals.read("b.jpg") == b"ab/b.jpg"
    assert originals.read("c.jpg") == originals.read("cd/c.jpg") == b"ab/cd/c.jpg"
    assert originals.read("deep.jpg") is None
    assert len(originals) == 3


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_zips(tmp_path: Path, compression: int) -> None:
    path = tmp_path / "train2017.zip"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("train2017/", b"")
        archive.writestr("train2017/1.jpg", b"one" * 99)
        archive.writestr("train2017/2.jpg", b"two")
    for places in ([path], [tmp_path]):
        originals = Originals(places)
        assert originals.read("1.jpg") == b"one" * 99
        assert originals.read("train2017/2.jpg") == b"two"
        assert originals.read("3.jpg") is None


def test_the_first_place_wins_and_folders_tell_equal_names_apart(tmp_path: Path) -> None:
    first = tar_of(tmp_path / "1.tar", {"./train/a.jpg": b"train", "val/a.jpg": b"val"})
    second = tar_of(tmp_path / "2.tar", {"train/a.jpg": b"later", "b.jpg": b"b"})
    originals = Originals([first, second])
    assert originals.read("a.jpg") == b"train"
    assert originals.read("val/a.jpg") == b"val"
    assert originals.read("data/val/a.jpg") == b"val"
    assert originals.read("train/a.jpg") == b"train"
    assert originals.read("elsewhere/b.jpg") == b"b"
    assert Originals([second, first]).read("train/a.jpg") == b"later"


def test_an_image_that_its_own_folder_lacks_is_not_another_folders(tmp_path: Path) -> None:
    for name in ("cc3m/1.jpg", "cc3m/2.jpg", "sbu/2.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    for places in ([tmp_path], [tmp_path / "cc3m", tmp_path / "sbu"]):
        originals = Originals(places)
        assert originals.read("images/cc3m/1.jpg" if len(places) == 1 else "cc3m/1.jpg")
        assert originals.read("sbu/2.jpg") == b"sbu/2.jpg"
        assert originals.read("sbu/1.jpg") is None
        assert originals.read("elsewhere/1.jpg") == b"cc3m/1.jpg"


def test_what_lies_beside_or_below_a_folder_makes_no_image_missing(tmp_path: Path) -> None:
    (tmp_path / "train" / "00").mkdir(parents=True)
    (tmp_path / "train" / "00" / "1.jpg").write_bytes(b"below")
    (tmp_path / "train" / "captions.tsv").write_bytes(b"no image")
    (tmp_path / "flat").mkdir()
    tar_of(tmp_path / "flat" / "0.tar", {"2.jpg": b"packed", "3.jpg": b"packed too"})
    for place in (tmp_path, tmp_path / "train"):
        assert Originals([place]).read("train/1.jpg") == b"below"
    assert Originals([tmp_path / "flat"]).read("flat/2.jpg") == b"packed"
    assert Originals([tmp_path / "train", tmp_path / "flat"]).read("train/2.jpg") is None


def test_what_is_damaged_or_gone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder, tar or zip"):
        Originals([tmp_path / "nowhere"])
    (tmp_path / "a.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(ConfigError, match="neither a tar nor a zip"):
        Originals([tmp_path / "a.tar"])
    path = tar_of(tmp_path / "b.tar", {"1.jpg": b"1" * 900, "2.jpg": b"2" * 900})
    path.write_bytes(path.read_bytes()[:2000])
    originals = Originals([path])
    assert originals.read("1.jpg") == b"1" * 900
    assert originals.read("2.jpg") is None
    assert len(originals.problems) == 1
    path.write_bytes(path.read_bytes()[:1000])  # cut while the build runs
    with pytest.raises(BadSample, match=r"unreadable image: .*b.tar: cut off at byte 512"):
        originals.read("1.jpg")


def test_a_damaged_member_of_a_zip(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("1.jpg", b"first image")
    data = bytearray(path.read_bytes())
    data[data.index(b"first")] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadSample, match="Bad CRC-32"):
        Originals([path]).read("1.jpg")


def test_links_in_tars_are_not_followed(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        info = tarfile.TarInfo("1.jpg")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    assert Originals([tmp_path / "a.tar"]).read("1.jpg") is None
