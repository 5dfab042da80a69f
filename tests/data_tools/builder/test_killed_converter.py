"""A real build, killed at random moments: nothing it leaves is later taken for good."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from raw_images import files_of, raw_image

from data_tools.__main__ import main
from vlp.data.shards.sample_files import contents

ROOT = Path(__file__).parents[3]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A command that takes a second: a few photos, reduced again and again."""
    folder = tmp_path / "images"
    folder.mkdir()
    images = []
    photos = [raw_image(number, (480, 360)) for number in range(3)]
    for number in range(80):
        if number % 17 != 5:
            target = folder / f"{number % 3}-{number}.jpg"
            target.write_bytes(photos[number % 3])
        sentence = {"raw": f"image {number}"}
        name = f"{number % 3}-{number}.jpg"
        images.append({"filename": name, "split": "train", "sentences": [sentence]})
    annotations = tmp_path / "toy.json"
    annotations.write_text(json.dumps({"dataset": "toy", "images": images}))
    places = ["--annotations", str(annotations), "--images", str(folder)]
    return ["flickr8k", *places, "--samples-per-shard", "8", "--max-side", "100"]


def children_of(process: int) -> list[int]:
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(child) for child in text.split()]


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_killed_again_and_again(command: list[str], tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "killed"
    assert main([*command, "--processes", "1", "--out", str(whole)]) == 0
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    full = [sys.executable, "-m", "data_tools", *command, "--processes", "2", "--out", str(out)]
    chance = random.Random(0)
    finished: list[int] = []
    for _ in range(3):
        running = subprocess.Popen(full, env=environment, stderr=subprocess.DEVNULL)
        wait_for = time.monotonic() + 60
        while not list(out.glob("train/*.tmp")) and time.monotonic() < wait_for:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.15))
        workers = children_of(running.pid)
        running.send_signal(signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
        for path in out.glob("train/*.tar"):
            assert contents(path).problem is None
            assert path.read_bytes() == (whole / "train" / path.name).read_bytes()
        assert not (out / "train" / "manifest.json").exists()
        while any(map(is_running, workers)) and time.monotonic() < wait_for:
            time.sleep(0.01)
        assert not any(map(is_running, workers))
        finished.append(len(list(out.glob("train/*.tar"))))
    assert finished == sorted(finished)
    assert main([*command, "--processes", "2", "--out", str(out)]) == 0
    assert files_of(out) == files_of(whole)


def test_ctrl_c(command: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    full = [sys.executable, "-m", "data_tools", *command, "--processes", "2", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(
        full, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for = time.monotonic() + 60
    while not list(out.glob("train/*.tar")) and time.monotonic() < wait_for:
        time.sleep(0.005)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to the workers too
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "run the same command again to go on" in said
    assert "Traceback" not in said
    assert not list(out.rglob("*.tmp"))
    assert list(out.glob("train/*.tar"))
