from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from benchmark_files import failures_of, lines_of, photo, said_of, samples_of

from data_tools.__main__ import main


def pair(identifier: str, **changes: Any) -> dict[str, Any]:
    row = {"Flickr30K_ID": "7", "pairID": identifier, "sentence1": "p", "sentence2": "h"}
    return row | {"gold_label": "neutral", "captionID": "7.jpg#0"} | changes


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "flickr30k-images"
    folder.mkdir()
    (folder / "7.jpg").write_bytes(photo())
    return folder


def test_real_rows_in_the_original_schema(shared: Path, tmp_path: Path) -> None:
    data = shared / "data_tasks" / "snli_ve"
    annotations = data / "original_schema_pairs.jsonl"
    arguments = ["snli_ve", "--annotations", str(annotations), "--processes", "1"]
    arguments += ["--images", str(data / "images_original_schema_pairs.tar")]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in annotations.read_text().splitlines()]
    samples = samples_of(tmp_path)
    assert [said_of(sample) for sample in samples.values()] == [
        {
            "version": 1,
            "source": "flickr30k",
            "image_id": row["Flickr30K_ID"],
            "premise": row["sentence1"],
            "hypothesis": row["sentence2"],
            "label": row["gold_label"],
            "pairID": row["pairID"],
            "captionID": row["captionID"],
        }
        for row in rows
    ]
    assert next(iter(samples)) == "2248275918_jpg_2r1c"
    assert len({sample.image for sample in samples.values()}) == 2
    assert failures_of(tmp_path) == {}


def test_real_rows_of_e_snli_ve(shared: Path, tmp_path: Path) -> None:
    data = shared / "data_tasks" / "snli_ve"
    packed = tmp_path / "dev.jsonl.gz"
    packed.write_bytes(gzip.compress((data / "dev_with_small_images.jsonl").read_bytes()))
    arguments = ["snli_ve", "--annotations", str(packed), "--processes", "1"]
    arguments += ["--images", str(data / "images_small.tar")]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    samples = samples_of(tmp_path / "out").values()
    assert len(samples) == 612
    assert len({sample.annotation.image_id for sample in samples}) == 32
    labels = Counter(sample.annotation.label for sample in samples)
    assert set(labels) == {"entailment", "neutral", "contradiction"}
    assert sum(sample.annotation.premise is None for sample in samples) > 0


def test_nothing_to_convert(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    annotations = lines_of(tmp_path / "dev.jsonl", [pair("b", gold_label="-")])
    arguments = ["snli_ve", "--annotations", str(annotations), "--images", str(images)]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert "no row can be used; the first is of kind 'no gold label': b" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    lines_of(annotations, [pair("b", Flickr30K_ID="8")])
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    assert "missing image: 1 (first: b)" in printed
    assert "no sample was written; are --images the images of this" in printed
