from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_files import failures_of, lines_of, said_of, samples_of, tar_of
from PIL import Image

from data_tools.__main__ import main
from data_tools.converters.statements import is_held_out
from vlp.data.shards.tar import stored_files


def pixels(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.array(image)


def example(identifier: str, **changes: Any) -> dict[str, Any]:
    return {"identifier": identifier, "sentence": "a yellow box", "label": "true"} | changes


def boxes_image(values: tuple[int, int, int]) -> bytes:
    """Boxes of three shades, with the alpha channel that the published images have."""
    array = np.full((100, 400, 4), 255, np.uint8)
    for number, value in enumerate(values):
        array[:, 150 * number : 150 * number + 100, :3] = value
    stream = io.BytesIO()
    Image.fromarray(array, "RGBA").save(stream, "png")
    return stream.getvalue()


def test_real_examples_in_all_permutations(shared: Path, tmp_path: Path) -> None:
    data = shared / "data_tasks" / "nlvr_v1"
    rows = [json.loads(line) for line in (data / "dev.jsonl").read_text().splitlines()[:20]]
    annotations = lines_of(tmp_path / "dev.json", rows)
    arguments = ["nlvr_v1", "--annotations", str(annotations), "--split", "dev"]
    arguments += ["--images", str(data / "dev_images.tar.xz"), "--permutations", "6"]
    assert main([*arguments, "--out", str(tmp_path / "out"), "--processes", "1"]) == 0
    samples = samples_of(tmp_path / "out")
    assert len(samples) == 120
    assert failures_of(tmp_path / "out") == {}
    assert not list((tmp_path / "out").glob(".unpacked-*"))
    files = stored_files(data / "dev_images.tar.xz", lambda name: True)
    stored = {name.stem: content for name, content in files}
    orders = list(itertools.permutations(range(3)))
    for row in rows:
        original = pixels(stored[f"dev-{row['identifier']}-0"])[..., :3]
        for number, order in enumerate(orders):
            sample = samples[f"dev-{row['identifier']}-{number}"]
            found = pixels(sample.image)
            assert found.shape == (100, 400, 3)
            expected = original.copy()
            for place, box in enumerate(order):
                columns = slice(150 * place, 150 * place + 100)
                expected[:, columns] = original[:, 150 * box : 150 * box + 100]
            np.testing.assert_array_equal(found, expected)
            assert said_of(sample) == {
                "version": 1,
                "source": "nlvr",
                "image_id": f"dev-{row['identifier']}",
                "statement": row["sentence"],
                "label": row["label"] == "true",
                "identifier": row["identifier"],
                "permutation": number,
            }


def test_a_published_permutation_is_taken_as_it_is(tmp_path: Path) -> None:
    files = {
        "images/dev/3/dev-1-0-0.png": boxes_image((10, 20, 30)),
        "images/dev/3/dev-1-0-3.png": boxes_image((1, 2, 3)),
    }
    tar = tar_of(tmp_path / "images.tar", files)
    annotations = lines_of(tmp_path / "dev.json", [example("1-0", directory="3")])
    arguments = ["nlvr_v1", "--annotations", str(annotations), "--split", "dev", "--permutations"]
    arguments += ["6", "--images", str(tar), "--out", str(tmp_path / "out"), "--processes", "1"]
    assert main(arguments) == 0
    middles = [
        tuple(int(pixels(sample.image)[50, column, 0]) for column in (50, 200, 350))
        for sample in samples_of(tmp_path / "out").values()
    ]
    assert middles == [
        (10, 20, 30), (10, 30, 20), (20, 10, 30), (1, 2, 3), (30, 10, 20), (30, 20, 10),
    ]  # fmt: skip


def test_whole_presentations_are_held_out(tmp_path: Path) -> None:
    rows = [example(f"{number}-{image}") for number in range(60) for image in range(4)]
    files = {f"train-{row['identifier']}-0.png": boxes_image((1, 2, 3)) for row in rows}
    annotations = lines_of(tmp_path / "train.json", rows)
    arguments = ["nlvr_v1", "--annotations", str(annotations), "--split", "train", "--images"]
    arguments += [str(tar_of(tmp_path / "images.tar", files)), "--processes", "1"]
    assert main([*arguments, "--hold-out", "0.25", "--out", str(tmp_path / "out")]) == 0
    folders = defaultdict(set)
    for folder in ("kept", "held_out"):
        for sample in samples_of(tmp_path / "out" / folder).values():
            folders[said_of(sample)["identifier"].partition("-")[0]].add(folder)
    assert len(folders) == 60
    assert all(len(found) == 1 for found in folders.values())
    held = sum(found == {"held_out"} for found in folders.values())
    assert held == sum(is_held_out(str(number), 0.25) for number in range(60))
    assert 5 < held < 25
    share = sum(is_held_out(str(number), 0.25) for number in range(4000)) / 4000
    assert abs(share - 0.25) < 0.03


@pytest.mark.parametrize(
    ("option", "message"),
    [(("--permutations", "7"), "1 to 6 are possible"), (("--hold-out", "1"), "a share from 0")],
)
def test_numbers_out_of_range(
    tmp_path: Path, capsys: pytest.CaptureFixture, option: tuple[str, str], message: str
) -> None:
    arguments = ["nlvr_v1", "--annotations", "x", "--split", "dev", "--images", str(tmp_path)]
    assert main([*arguments, "--out", str(tmp_path / "out"), *option]) == 2
    assert message in capsys.readouterr().err


def test_killed_while_it_converts_a_compressed_archive(tmp_path: Path) -> None:
    rows = [example(f"{number}-0") for number in range(60)]
    files = {
        f"dev-{row['identifier']}-0.png": boxes_image((number, 20, 30))
        for number, row in enumerate(rows)
    }
    annotations = lines_of(tmp_path / "dev.json", rows)
    tar = tar_of(tmp_path / "images.tar.xz", files, "w:xz")
    arguments = ["nlvr_v1", "--annotations", str(annotations), "--split", "dev", "--images"]
    arguments += [str(tar), "--permutations", "6", "--samples-per-shard", "20"]
    arguments += ["--processes", "1"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-m", "data_tools", *arguments, "--out", str(killed)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not list(killed.glob("*.tar")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(killed.glob(".unpacked-*"))
    assert not (killed / "manifest.json").exists()
    assert main([*arguments, "--out", str(killed)]) == 0
    assert main([*arguments, "--out", str(whole)]) == 0
    assert {path.name: path.read_bytes() for path in killed.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }
