"""`--images` that lie in the place itself, or around it: every file counts once."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_forms import as_csv, as_tar, images, pairs, rows, write
from raw_images import files_of

from data_tools.__main__ import main


def imported(out: Path, place: Path, *more: object) -> int:
    options = ["--out", str(out), "--name", "mine", "--processes", "1"]
    return main(["import", str(place), *options, *map(str, more)])


@pytest.mark.parametrize("named", ["photo", "photos/photo"])
@pytest.mark.parametrize("where", ["inside", "around", "archive", "twice"])
def test_images_of_a_table(
    where: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    table = [{**row, "image": row["image"].replace("photo", named)} for row in rows()]
    files = {"table.csv": as_csv(table)}
    place = tmp_path / "set"
    photos = {f"photos/{name}": data for name, data in images().items()}
    if where == "archive":
        write(place, files)
        inside = as_tar(place / "set.tar", photos)
    else:
        write(place, files | photos)
        inside = {"inside": place / "photos", "around": tmp_path, "twice": place}[where]
    assert imported(tmp_path / "plain" / ".shards", place) == 0
    assert imported(tmp_path / "out" / ".shards", place, "--images", inside) == 0
    assert capsys.readouterr().out.count("  16 images, 22 captions") == 2
    assert files_of(tmp_path / "out") == files_of(tmp_path / "plain")


def test_captions_beside_images(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    place = write(tmp_path / "set", {f"photos/{name}": data for name, data in pairs().items()})
    assert imported(tmp_path / "out", place, "--images", place / "photos") == 0
    said = capsys.readouterr().out
    assert "  16 images, 22 captions" in said
    assert "have the bytes of another one" not in said


def test_a_name_that_two_folders_have_is_of_the_named_one(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    others = {f"b/{name}": data for name, data in images().items()}
    files = {f"a/{name}": data for name, data in images().items()} | others
    place = write(tmp_path / "set", {**files, "table.csv": as_csv(rows())})
    more = ("--images", place / "a", "--allow-missing-captions")
    assert imported(tmp_path / "out", place, *more) == 0
    said = "32 images, and 16 of them have no caption (first: b/photo 00.jpg): left out"
    assert said in capsys.readouterr().out
