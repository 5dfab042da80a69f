"""Two real commands in one folder: the first writes on, the second says who writes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from made_shards import jpeg, write
from raw_images import files_of, raw_image

from data_tools.__main__ import main
from vlp.lock import FolderLock

ROOT = Path(__file__).parents[3]
REFUSED = re.compile(
    r"\Adata_tools \w+: (.*): is being written by process (\d+) on \S+ since .*; wait for its end, "
    r"or name another folder\n\Z"
)


@pytest.fixture
def converter(tmp_path: Path) -> list[str]:
    """Flickr8k of forty images in a compressed tar, which is unpacked into OUT first."""
    images = []
    with tarfile.open(tmp_path / "images.tar.gz", "w:gz") as archive:
        for number in range(40):
            path = tmp_path / f"{number}.jpg"
            path.write_bytes(raw_image(number, (240, 180)))
            archive.add(path, path.name)
            sentence = {"raw": f"image {number}"}
            images.append({"filename": path.name, "split": "train", "sentences": [sentence]})
    (tmp_path / "toy.json").write_text(json.dumps({"dataset": "toy", "images": images}))
    places = ["--annotations", tmp_path / "toy.json", "--images", tmp_path / "images.tar.gz"]
    return ["flickr8k", *map(str, places), "--samples-per-shard", "8", "--max-side", "100"]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "data_tools", *arguments, "--processes", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("command", ["converter", "scenes"])
def test_the_second_is_refused_and_the_first_loses_nothing(
    command: str, converter: list[str], tmp_path: Path
) -> None:
    arguments = converter
    if command == "scenes":
        arguments = ["scenes", "--train", "300", "--val", "0", "--image-size", "32"]
    assert main([*arguments, "--processes", "1", "--out", str(tmp_path / "alone")]) == 0
    out = tmp_path / "out"
    first = start([*arguments, "--out", str(out)])
    wait_for = time.monotonic() + 60
    while not list(out.glob("train/*.tmp")) and time.monotonic() < wait_for:
        time.sleep(0.002)
    first.send_signal(signal.SIGSTOP)  # in the middle of its work
    try:
        second = start([*arguments, "--out", str(out)])
        _, said = second.communicate(timeout=60)
    finally:
        first.send_signal(signal.SIGCONT)
    refused = REFUSED.match(said)
    assert second.returncode == 2, said
    assert refused is not None, said
    assert (refused[1], refused[2]) == (str(out), str(first.pid))
    _, said = first.communicate(timeout=60)
    assert first.returncode == 0, said
    assert files_of(out) == files_of(tmp_path / "alone")


def test_every_writer_waits_for_no_other_and_touches_nothing(
    converter: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = write(tmp_path / "shards", {str(number): jpeg(number) for number in range(9)})
    out = tmp_path / "out"
    commands = {
        out / "train": [*converter, "--out", str(out)],
        out / "b": ["scenes", "--train", "8", "--val", "0", "--out", str(out / "b")],
        out / "c": ["reshard", str(shards), "--samples-per-shard", "3", "--out", str(out / "c")],
        shards: ["index", str(shards)],
    }
    (shards / "index.npz").unlink()
    for folder, arguments in commands.items():
        with FolderLock(folder):
            before = files_of(folder)
            assert main([*arguments, "--processes", "1"]) == 2
            assert REFUSED.match(capsys.readouterr().err.splitlines(keepends=True)[-1])
            assert files_of(folder) == before
        assert main([*arguments, "--processes", "1"]) == 0
        assert not list(folder.glob(".lock*"))


@pytest.mark.parametrize("out", ["/proc/shards", "/dev/null"])
def test_a_folder_that_cannot_be_written_is_said_in_one_line(
    out: str, converter: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = write(tmp_path / "shards", {str(number): jpeg(number) for number in range(2)})
    for command in (
        converter,
        ["scenes", "--train", "8"],
        ["reshard", str(shards), "--samples-per-shard", "3"],
    ):
        assert main([*command, "--processes", "1", "--out", out]) == 2
        said = capsys.readouterr().err
        assert re.fullmatch(rf"data_tools \w+: {out}: cannot be written \([\w ]+\)\n", said), said


def test_another_data_set_or_a_truncated_list_loses_no_shard(
    converter: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, alone = tmp_path / "out", tmp_path / "alone"
    end = ["--processes", "1", "--out"]
    assert main([*converter, *end, str(out)]) == 0
    whole = files_of(out)
    listed = json.loads((tmp_path / "toy.json").read_text())
    (tmp_path / "short.json").write_text(json.dumps(listed | {"images": listed["images"][:20]}))
    other = ["coco", *converter[1:]]
    shorter = [part.replace("toy.json", "short.json") for part in converter]
    capsys.readouterr()
    for command, said in (
        (other, "begun with data_set Flickr8k, train, this command says COCO captions, train: "),
        (shorter, "shard-000002.tar: holds 20, one of 4 samples that this list does not have "),
    ):
        assert main([*command, *end, str(out)]) == 2
        message = capsys.readouterr().err.splitlines()[-1]
        assert said in message, message
        assert message.endswith("choose another --out, or --replace what is there")
        assert files_of(out) == whole
    assert main([*shorter, "--replace", *end, str(out)]) == 0
    assert main([*shorter, *end, str(alone)]) == 0
    assert files_of(out) == files_of(alone)
