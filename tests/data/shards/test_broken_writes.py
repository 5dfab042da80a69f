"""A writer of shards that is killed, or whose disk is full: nothing half written keeps its name."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vlp.config import ConfigError
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardIndex, ShardWriter
from vlp.lock import is_lock


def write(
    folder: Path, count: int = 10, before: Callable[[int], None] = lambda number: None
) -> None:
    with ShardWriter(folder, 4) as writer:
        for number in range(count):
            before(number)
            if f"k{number}" not in writer.done:
                image = bytes([number % 256]) * (700 + 5000 * (number % 3))
                writer.write(f"k{number}", image, "png", Annotation(caption=f"image {number}"))


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in sorted(folder.iterdir()) if not is_lock(path))
    return {path.name: path.read_bytes() for path in found}


def require_whole(folder: Path, whole: dict[str, bytes]) -> None:
    """Whatever has its final name has its final content, and there is no index too early."""
    found = {name: data for name, data in files(folder).items() if not name.endswith(".tmp")}
    for name, data in found.items():
        assert data == whole[name], name
    tars = [name for name in whole if name.endswith(".tar")]
    there = [name for name in tars if name in found]
    assert there == tars[: len(there)]
    if "index.npz" in found:
        assert found == whole


@pytest.mark.nightly
def test_killed_at_any_moment_again_and_again(tmp_path: Path) -> None:
    count = 200
    started = time.monotonic()
    write(tmp_path / "whole", count)
    whole_run = time.monotonic() - started
    whole, folder = files(tmp_path / "whole"), tmp_path / "killed"
    rng = np.random.default_rng(0)
    kills = 0
    for _ in range(12):
        child = multiprocessing.get_context("fork").Process(target=write, args=(folder, count))
        child.start()
        child.join(float(rng.uniform(0, whole_run / 4)))
        child.kill()
        child.join()
        kills += child.exitcode == -signal.SIGKILL
        if folder.exists():
            require_whole(folder, whole)
    assert kills >= 3
    write(folder, count)
    assert files(folder) == whole


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a device")
def test_a_disk_that_is_full_is_named_and_finished_shards_stay(tmp_path: Path) -> None:
    write(tmp_path / "whole")
    whole, folder = files(tmp_path / "whole"), tmp_path / "full"

    def full_at(number: int) -> None:
        if number == 4:  # /dev/full takes no byte, as a disk without room
            os.mknod(folder / "shard-000001.tar.tmp", stat.S_IFCHR | 0o600, os.makedev(1, 7))

    with pytest.raises(
        ConfigError, match=r"shard-000001\.tar.*No space left on device.*finished shards stay"
    ):
        write(folder, before=full_at)
    assert files(folder) == {"shard-000000.tar": whole["shard-000000.tar"]}
    write(folder)
    assert files(folder) == whole


@pytest.mark.parametrize("deleted", [[0], [1], [0, 1], [2]])
def test_deleted_shards_come_back_and_the_others_stay(tmp_path: Path, deleted: list[int]) -> None:
    write(tmp_path)
    whole = files(tmp_path)
    for number in deleted:
        (tmp_path / f"shard-{number:06d}.tar").unlink()
    for _ in range(2):
        write(tmp_path)
        assert files(tmp_path) == whole
    assert [entry.name for entry in ShardIndex.open(tmp_path).shards] == sorted(
        name for name in whole if name.endswith(".tar")
    )


def test_a_shard_of_another_process_is_not_written_over(tmp_path: Path) -> None:
    other = tmp_path / "shard-000000.tar"
    with pytest.raises(ConfigError, match=r"shard-000000\.tar: was written by another process"):
        write(tmp_path, before=lambda number: other.write_bytes(b"theirs") if number == 3 else None)
    assert files(tmp_path) == {other.name: b"theirs"}
