"""An import run again after images were added: they follow, and no earlier sample changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_shards import encoded, photo
from own_forms import Files, write

from data_tools.__main__ import main
from data_tools.own.import_data import NAME, keys_of
from vlp.data.shards.sample_files import contents
from vlp.data.shards.shard_reader import ShardIndex

SPLITS = ("train", "val", "test")


def pictures(numbers: range, folder: str = "") -> Files:
    files: Files = {}
    for number in numbers:
        files[f"{folder}{number:03d}.jpg"] = encoded(photo(number))
        files[f"{folder}{number:03d}.txt"] = f"picture {number}".encode()
    return files


def imported(place: Path, *options: str) -> int:
    shares = ("--split", "0.5", "0.3", "0.2", "--samples-per-shard", "8")
    return main(["import", str(place), "--out", str(place.parent / "out"), *shares, *options])


def shards(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.tar")}


def sides(out: Path) -> dict[str, str]:
    """The split of each key."""
    return {
        sample.key: split
        for split in SPLITS
        for tar in sorted((out / split).glob("*.tar"))
        for sample in contents(tar).samples
    }


def test_images_sorted_before_and_between_follow_those_of_before(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    place, out = write(tmp_path / "mine", pictures(range(10, 60, 2), "b/")), tmp_path / "out"
    assert imported(place) == 0
    before, where = shards(out), sides(out)
    assert set(where) == {f"{number:03d}" for number in range(10, 60, 2)}
    # Sorted in between, and in a folder that shares no part of the path.
    write(place, pictures(range(11, 40, 2), "b/") | pictures(range(70, 90), "a/"))
    assert imported(place) == 0
    assert "35 images are new" in capsys.readouterr().out
    after = sides(out)
    assert len(after) == 60
    assert before.items() <= shards(out).items()
    assert where.items() <= after.items()
    assert {"b_011", "a_070"} <= set(after)
    for split in SPLITS:
        assert ShardIndex.open(out / split).shards.total == list(after.values()).count(split)
    grown = shards(out)
    assert imported(place) == 0  # once more: nothing is new
    assert "images are new" not in capsys.readouterr().out
    assert shards(out) == grown


def test_an_image_like_an_earlier_one_goes_to_its_side(tmp_path: Path) -> None:
    place, out = write(tmp_path / "mine", pictures(range(40))), tmp_path / "out"
    assert imported(place) == 0
    where = sides(out)
    files: Files = {}
    for number in range(40):  # the same pictures in another quality
        files[f"0{number:03d}.jpg"] = encoded(photo(number), quality=60)
        files[f"0{number:03d}.txt"] = b"again"
    write(place, files)
    assert imported(place) == 0
    after = sides(out)
    assert len(after) == 80
    assert all(after[f"0{key}"] == split for key, split in where.items())


def test_equal_names_keep_their_numbers(tmp_path: Path) -> None:
    known = keys_of(["p/x.jpg", "p/x.png", "p/y.jpg"], {})
    assert known == ["x-1", "x-2", "y"]
    before = dict(zip(("p/x.jpg", "p/x.png", "p/y.jpg"), known))
    grown = keys_of([*before, "p/y.png", "p/x.gif", "p/x-1.gif"], before)
    assert grown[:3] == known
    assert len(set(grown)) == 6
    assert keys_of([*before, "q/y.jpg"], before)[3] == "q_y"


def test_a_growth_that_is_refused_is_not_remembered(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    place, out = write(tmp_path / "mine", pictures(range(20))), tmp_path / "out"
    assert imported(place) == 0
    before = (out / NAME).read_bytes()
    for path in place.glob("003.*"):
        path.unlink()
    write(place, pictures(range(100, 110)))
    assert imported(place) == 2
    assert "holds 003, one of 1 samples" in capsys.readouterr().err
    assert (out / NAME).read_bytes() == before
    assert imported(place, "--replace") == 0
    assert len(sides(out)) == 29
    assert len((out / NAME).read_text().splitlines()) == 29


def test_a_damaged_memory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    place, out = write(tmp_path / "mine", pictures(range(20))), tmp_path / "out"
    assert imported(place) == 0
    for line in (["a", "b"], 5, [["a"], "b", "train"]):
        (out / NAME).write_text(json.dumps(line) + "\n")
        assert imported(place) == 2
        assert f"{out / NAME}: damaged" in capsys.readouterr().err
