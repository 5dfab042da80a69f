from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_files import failures_of, lines_of, photo, said_of, samples_of

from data_tools.__main__ import main
from vlp.data.shards.tar import stored_files


def example(identifier: str, **changes: Any) -> dict[str, Any]:
    return {"identifier": identifier, "sentence": "two dogs", "label": "True"} | changes


def test_real_pairs(shared: Path, tmp_path: Path) -> None:
    data = shared / "data_tasks" / "nlvr2"
    arguments = ["nlvr2", "--annotations", str(data / "with_images.json"), "--processes", "1"]
    arguments += ["--images", str(data / "images_384.tar"), "--extension", "jpg"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    images = {str(name): content for name, content in stored_files(data / "images_384.tar", bool)}
    rows = [json.loads(line) for line in (data / "with_images.json").read_text().splitlines()]
    samples = list(samples_of(tmp_path).values())
    assert len(samples) == len(rows) == 16
    for row, sample in zip(rows, samples):
        pair = row["identifier"].rpartition("-")[0]
        assert sample.key == row["identifier"]
        assert sample.image == images[f"{pair}-img0.jpg"]
        assert sample.second_image == images[f"{pair}-img1.jpg"]
        assert said_of(sample) == {
            "version": 1,
            "source": "nlvr2",
            "image_id": pair,
            "statement": row["sentence"],
            "label": row["label"] == "True",
            "identifier": row["identifier"],
            "left_url": row["left_url"],
            "right_url": row["right_url"],
        }


def test_folders_of_the_training_set_and_rows_that_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for folder in ("12", "34"):
        (tmp_path / "train" / folder).mkdir(parents=True)
    for name in ("12/train-1-0-img0.png", "12/train-1-0-img1.png", "34/train-2-0-img0.png"):
        (tmp_path / "train" / name).write_bytes(photo(kind="png"))
    rows = [
        example("train-1-0-0", directory=12),
        example("train-1-0-0", sentence="again"),
        example("train-1-0-1", label="false"),
        example("train-1-0-2", label="Perhaps"),
        example("train-1-0-3", label=None),
        example("train-2-0-0", directory=34),
        example("nonsense"),
        example("train-1-0-4", sentence=""),
    ]
    annotations = lines_of(tmp_path / "train.json", rows)
    arguments = ["nlvr2", "--annotations", str(annotations), "--images", str(tmp_path / "train")]
    assert main([*arguments, "--out", str(tmp_path / "out"), "--processes", "1"]) == 0
    samples = samples_of(tmp_path / "out")
    assert {key: sample.annotation.label for key, sample in samples.items()} == {
        "train-1-0-0": True,
        "train-1-0-1": False,
        "train-1-0-3": None,
    }
    assert failures_of(tmp_path / "out") == {
        "identifier given twice": ["train-1-0-0"],
        "unknown label": ["train-1-0-2 (Perhaps)"],
        "missing image": ["train-2-0-0"],
        "identifier is not split-set-pair-sentence": ["nonsense"],
        "no statement": ["train-1-0-4"],
    }
    arguments[2] = str(tmp_path / "none.json")
    assert main([*arguments, "--out", str(tmp_path / "none")]) == 2
    assert "none.json: cannot be read" in capsys.readouterr().err
