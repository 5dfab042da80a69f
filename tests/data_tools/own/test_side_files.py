"""Captions in files beside the images, and which of several files they are taken from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_shards import encoded, photo
from own_forms import Files, as_csv, write

from data_tools.__main__ import main
from vlp.data.shards.shard_reader import ShardIndex


def imported(place: Path, *options: str) -> list[list[str]]:
    """The captions of each image, all of them in train."""
    out = place.parent / "out"
    command = ["import", str(place), "--out", str(out), "--processes", "1"]
    assert main([*command, "--split", "1", "0", "0", *options]) == 0
    index = ShardIndex.open(out / "train")
    return [index.read(0, number).annotation.captions or [] for number in range(index.shards.total)]


def test_captions_of_the_json_come_before_those_of_the_text(tmp_path: Path) -> None:
    """Training on the same files reads the text only where the JSON has no caption."""
    about = [
        {"caption": "of the JSON"},
        {"caption": "one", "captions": ["several", "of the JSON"]},
        {"title": "IMG_2", "caption": ""},
        {"title": "of nothing else"},
    ]
    files = {}
    for number, content in enumerate(about):
        files[f"{number}.jpg"] = encoded(photo(number))
        files[f"{number}.json"] = json.dumps(content).encode()
        files[f"{number}.txt"] = b"of the text" if number < 3 else b""
    assert imported(write(tmp_path / "mine", files)) == [
        ["of the JSON"],
        ["several", "of the JSON"],
        ["of the text"],
        ["of nothing else"],
    ]


def test_a_caption_ends_where_its_line_does(tmp_path: Path) -> None:
    """Not at other characters that Unicode calls the end of a line."""
    texts = ["a dog\u2028on grass\r\ntwo dogs\r\n", "one\x85caption\x0bmore"]
    files = {}
    for number, text in enumerate(texts):
        files[f"{number}.jpg"] = encoded(photo(number))
        files[f"{number}.txt"] = text.encode()
    assert imported(write(tmp_path / "mine", files)) == [
        ["a dog on grass", "two dogs"],
        ["one caption more"],
    ]


def _both() -> Files:
    """Eight images with a JSON and a text beside each."""
    files = {}
    for number in range(8):
        about = {"alt": f"alt {number}", "long": [f"long {number}"], "caption": "not this"}
        files[f"{number}.jpg"] = encoded(photo(number))
        files[f"{number}.json"] = json.dumps(about | {"fold": "train" if number else "x"}).encode()
        files[f"{number}.txt"] = b"nor this"
    return files


def test_named_keys_of_the_json_files(tmp_path: Path) -> None:
    place = write(tmp_path / "mine", _both())
    assert imported(place, "--caption", "long", "alt") == [
        [f"long {number}", f"alt {number}"] for number in range(8)
    ]


def test_a_table_with_the_named_columns_comes_before_files_beside_the_images(
    tmp_path: Path,
) -> None:
    table = as_csv([{"image": f"{number}.jpg", "alt": f"table {number}"} for number in range(8)])
    place = write(tmp_path / "mine", {**_both(), "table.csv": table})
    assert imported(place, "--caption", "alt") == [[f"table {number}"] for number in range(8)]


@pytest.mark.parametrize("columns", [("image", "caption"), ("bild", "satz")])
def test_a_table_that_is_named_itself_comes_before_files_beside_the_images(
    tmp_path: Path, columns: tuple[str, str], capsys: pytest.CaptureFixture
) -> None:
    rows = [dict(zip(columns, (f"{number}.jpg", f"table {number}"))) for number in range(4)]
    place = write(tmp_path / "mine", {"own.csv": as_csv(rows)}) / "own.csv"
    images = str(write(tmp_path / "mine" / "photos", {**_both(), "other.csv": b"image,caption\n"}))
    if columns == ("image", "caption"):
        assert imported(place, "--images", images) == [[f"table {number}"] for number in range(4)]
    else:
        options = ["--images", images, "--out", str(tmp_path / "out")]
        assert main(["import", str(place), *options]) == 2
        assert "bild, satz" in capsys.readouterr().err


def test_a_named_split_of_the_json_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    command = ["import", str(write(tmp_path / "mine", _both())), "--out", str(tmp_path / "out")]
    assert main([*command, "--split-column", "fold"]) == 2
    assert "--split-column: 'x' is no split" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--image", "--caption", "--split-column"])
def test_a_named_column_that_is_nowhere(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    table = as_csv([{"image": f"{number}.jpg", "text": "a dog"} for number in range(8)])
    place = write(tmp_path / "mine", {**_both(), "table.csv": table})
    assert main(["import", str(place), "--out", str(tmp_path / "out"), option, "gone"]) == 2
    said = capsys.readouterr().err
    assert "neither a table nor a .json file beside an image has gone" in said


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("0.json", b'{"caption": "cut off', "Unterminated string"),
        ("0.json", b'{"caption": "\xe9"}', "not UTF-8"),
        ("0.txt", b"caf\xe9", "not UTF-8"),
    ],
)
def test_annotations_that_cannot_be_read_are_no_missing_captions(
    name: str, data: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    files = {f"{number}.jpg": encoded(photo(number)) for number in range(3)}
    files |= {f"{number}.txt": b"a dog" for number in (1, 2)} | {name: data}
    place = write(tmp_path / "mine", files)
    assert main(["import", str(place), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "1 of them have no caption (first: 0.jpg)" in said
    assert f"; 1 annotations cannot be read (first: {name}: {reason}" in said
