"""A folder that is replaced: its readers always find a whole one, whenever the writer is killed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import vlp.io
from vlp.io import atomic_folder, restore_folder

WRITER = """
import json, sys
from pathlib import Path
from vlp.io import atomic_folder, restore_folder
place, number = Path(sys.argv[1]), 0
restore_folder(place)
while True:
    number += 1
    with atomic_folder(place) as partial:
        partial.mkdir()
        for name in ("a", "b"):
            (partial / name).write_text(json.dumps([number] * 1000))
"""


def read(place: Path, seconds: float) -> set[int]:
    """Read a folder again and again; returns the numbers of those that were there, each whole."""
    seen, end = set(), time.monotonic() + seconds
    while time.monotonic() < end:
        for name in ("a", "b"):
            content = json.loads((place / name).read_text())
            if content != 0:
                assert len(content) == 1000
                assert len(set(content)) == 1
                seen.add(content[0])
    return seen


def write(place: Path, number: int) -> None:
    with atomic_folder(place) as partial:
        partial.mkdir()
        (partial / "a").write_text(str(number))


@pytest.mark.nightly
def test_a_reader_finds_a_whole_folder_while_it_is_written_and_its_writer_killed(tmp_path):
    place, rng, seen = tmp_path / "model", random.Random(1), set[int]()
    write(place, 0)
    (place / "b").write_text("0")
    for _ in range(8):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(place)])
        try:
            seen |= read(place, seconds=rng.uniform(0.3, 0.8))
        finally:
            writer.kill()
            writer.wait()
        assert {path.name for path in place.iterdir()} == {"a", "b"}
    assert len(seen) > 20


@pytest.mark.parametrize("can_exchange", [True, False])
def test_the_former_folder_goes(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(vlp.io, "_exchanged", lambda new, place: False)
    for number in range(3):
        write(tmp_path / "model", number)
        assert (tmp_path / "model" / "a").read_text() == str(number)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_was_put_aside_comes_back(tmp_path, monkeypatch):
    place = tmp_path / "model"
    write(place, 1)
    monkeypatch.setattr(vlp.io, "_exchanged", lambda new, place: False)
    monkeypatch.setattr(Path, "rename", renamed_once(Path.rename))
    with pytest.raises(KeyboardInterrupt):
        write(place, 2)
    monkeypatch.undo()
    assert not place.exists()
    restore_folder(place)
    assert (place / "a").read_text() == "1"


def renamed_once(rename):
    """`Path.rename` that is interrupted at its second call."""
    calls = []

    def interrupted(self, to):
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rename(self, to)

    return interrupted
