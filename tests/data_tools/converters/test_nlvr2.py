from __future__ import annotations

import json
from pathlib import Path

from benchmark_files import said_of, samples_of

from data_tools.__main__ import main
from vlp.data.shards.tar import stored_files


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
