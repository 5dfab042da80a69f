"""Splits of a data set of the hub, all or those that the command line names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_forms import structs

from data_tools.__main__ import main
from data_tools.own import forms

PARTS = {"train": slice(0, 8), "test": slice(8, 12), "extra": slice(12, 16)}


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """The import of a data set with a split of another name beside train and test."""
    import pyarrow as pa
    from pyarrow import parquet

    folder = tmp_path / "set"
    folder.mkdir()
    files = [{"split": name, "path": f"{name}.parquet"} for name in PARTS]
    about = json.dumps([{"config_name": "default", "data_files": files}])
    (folder / "README.md").write_text(f"---\nconfigs: {about}\n---\n")
    for name, part in PARTS.items():
        parquet.write_table(pa.Table.from_pylist(structs()[part]), folder / f"{name}.parquet")
    return ["import", f"hub:{folder}", "--out", str(tmp_path / "out"), "--processes", "1"]


def test_a_split_that_is_none_is_refused_before_it_is_streamed(
    command: list[str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def streamed(*arguments: object) -> Iterator[None]:
        raise AssertionError

    monkeypatch.setattr(forms, "value_image", streamed)
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "'extra' is no split, but stands beside train and test; choose others with" in said


def test_splits_are_chosen(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main([*command, "--splits", "test", "train"]) == 0
    assert "split as the data has it: train 8, test 4" in capsys.readouterr().out
    assert sorted(path.parent.name for path in tmp_path.glob("out/*/index.npz")) == [
        "test",
        "train",
    ]


def test_splits_that_cannot_be_chosen(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main([*command, "--splits", "train", "gone"]) == 2
    assert "--splits: there is no 'gone', only train, test, extra" in capsys.readouterr().err
    assert main(["import", str(tmp_path), *command[2:], "--splits", "train"]) == 2
    assert "is no data set of the hub" in capsys.readouterr().err


def test_a_row_that_points_out_of_the_data_set_is_counted_and_not_read(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = structs()[:8]
    private = tmp_path / "private" / "me.jpg"
    private.parent.mkdir()
    private.write_bytes(rows[0]["image"]["bytes"])
    for row, path in zip(rows, (f"{private}", f"file://{private}", "http://127.0.0.1:9/me.jpg")):
        row["image"] = {"bytes": None, "path": path}
    (tmp_path / "set").mkdir()
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "set" / "train.parquet")
    out = tmp_path / "out"
    command = ["import", f"hub:{tmp_path / 'set'}", "--out", str(out), "--processes", "1"]
    assert main([*command, "--split", "1", "0", "0"]) == 0
    manifest = json.loads((out / "train" / "manifest.json").read_text())
    assert manifest["samples"] == 5
    assert manifest["failures"]["image outside the data set"]["count"] == 3
    assert forms._is_own("zip://a.jpg::hf://datasets/me/set@abc/a.zip", "me/set")
    for path in (
        "file:///etc/x::hf://datasets/me/set@abc/a.zip",
        "hf://datasets/me/setting@abc/a.jpg",
        "https://example.org/a.jpg",
        "/etc/a.jpg",
    ):
        assert not forms._is_own(path, "me/set")
