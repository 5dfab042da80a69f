"""Names of own images: what keys make of them, and names that are no text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from made_shards import encoded, photo
from own_forms import Files, write

from data_tools.__main__ import main
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardIndex
from vlp.data.shards.tar import readable

ALL_TRAIN = ["--split", "1", "0", "0"]


def imported(place: Path) -> dict[str, Annotation]:
    """The annotation of each key, all of them in train."""
    out = place.parent / "out"
    assert main(["import", str(place), "--out", str(out), "--processes", "1", *ALL_TRAIN]) == 0
    index = ShardIndex.open(out / "train")
    samples = [index.read(0, number) for number in range(index.shards.total)]
    return {sample.key: sample.annotation for sample in samples}


def test_signs_that_are_not_seen_are_replaced_in_keys(tmp_path: Path) -> None:
    """Joiners of emoji and of scripts, and a control character; equal keys get a number."""
    names = ["a\u200db", "a\u200cb", "c\x07d", "\U0001f469\u200d\U0001f373"]
    files: Files = {}
    for number, name in enumerate(names):
        files[f"{name}.jpg"] = encoded(photo(number))
        files[f"{name}.txt"] = f"picture {number}".encode()
    found = imported(write(tmp_path / "mine", files))
    assert {key: annotation.captions for key, annotation in found.items()} == {
        "a_b-2": ["picture 0"],
        "a_b-1": ["picture 1"],
        "c_d": ["picture 2"],
        "\U0001f469_\U0001f373": ["picture 3"],
    }


def _with_names_that_are_no_text(folder: Path) -> Path:
    folder.mkdir()
    for number in range(2):
        name = os.fsencode(folder / f"caf{number}") + b"\xe9"
        try:
            Path(os.fsdecode(name + b".jpg")).write_bytes(encoded(photo(number)))
        except OSError:
            pytest.skip("this file system takes names in UTF-8 only")
        Path(os.fsdecode(name + b".txt")).write_text(f"picture {number}")
    return folder


def test_names_that_are_not_utf_8(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    found = imported(_with_names_that_are_no_text(tmp_path / "mine"))
    assert {key: annotation.captions for key, annotation in found.items()} == {
        "caf0_": ["picture 0"],
        "caf1_": ["picture 1"],
    }
    stored = {(annotation.model_extra or {})["file"] for annotation in found.values()}
    assert stored == {readable(f"caf{number}\udce9.jpg") for number in range(2)}
    capsys.readouterr().out.encode("utf-8", "strict")


def test_names_that_are_not_utf_8_in_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    place = _with_names_that_are_no_text(tmp_path / "mine")
    Path(os.fsdecode(os.fsencode(place / "caf0") + b"\xe9.txt")).write_text("")
    command = ["import", str(place), "--out", str(tmp_path / "out"), *ALL_TRAIN]
    assert main(command) == 2
    said = f"1 of them have no caption (first: {readable('caf0' + chr(0xDCE9))}.jpg)"
    assert said in capsys.readouterr().err
    assert main([*command, "--allow-missing-captions"]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["jfif", "JPE"])
@pytest.mark.parametrize("by", ["files", "table"])
def test_other_names_of_a_jpeg(by: str, suffix: str, tmp_path: Path) -> None:
    """Browsers save a JPEG as `.jfif`."""
    files = {f"{number}.{suffix}": encoded(photo(number)) for number in range(3)}
    if by == "files":
        files |= {f"{number}.txt": f"picture {number}".encode() for number in range(3)}
    else:
        lines = [f"{number}.{suffix},picture {number}" for number in range(3)]
        files["table.csv"] = "\n".join(lines).encode()
    found = imported(write(tmp_path / "mine", files))
    assert {key: annotation.captions for key, annotation in found.items()} == {
        str(number): [f"picture {number}"] for number in range(3)
    }
