"""A writer of shards that is killed, or whose disk is full: nothing half written keeps its name."""

import os
import resource
import signal

import pytest
from killed_steps import in_child, killed_at, steps_of

from vlp.config import ConfigError
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardIndex, ShardWriter, index_folder
from vlp.lock import is_lock


def write(folder, count=10, before=lambda number: None):
    with ShardWriter(folder, 4) as writer:
        for number in range(count):
            before(number)
            if f"k{number}" not in writer.done:
                image = bytes([number % 256]) * (700 + 5000 * (number % 3))
                writer.write(f"k{number}", image, "png", Annotation(caption=f"image {number}"))


def files(folder):
    found = (path for path in sorted(folder.iterdir()) if not is_lock(path))
    return {path.name: path.read_bytes() for path in found}


def require_whole(folder, whole):
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
def test_killed_before_any_step_of_writing(tmp_path):
    write(tmp_path / "whole")
    whole = files(tmp_path / "whole")
    steps = steps_of(write, tmp_path / "counted")
    assert steps > 80
    for step in range(0, steps, 3):
        folder = tmp_path / f"killed at {step}"
        folder.mkdir()
        assert in_child(killed_at, step, write, folder) == -signal.SIGKILL
        require_whole(folder, whole)
        write(folder)
        assert files(folder) == whole


@pytest.mark.nightly
def test_killed_while_indexing_the_old_index_or_the_new_one_is_there(tmp_path):
    write(tmp_path / "old", 4)
    write(tmp_path / "new", 8)
    shard = "shard-000001.tar"
    start = files(tmp_path / "old") | {shard: files(tmp_path / "new")[shard]}

    def folder_before(name):
        folder = tmp_path / name
        folder.mkdir()
        for file, data in start.items():
            (folder / file).write_bytes(data)
        return folder

    outcomes = set()
    for step in range(steps_of(index_folder, folder_before("counted"))):
        folder = folder_before(f"killed at {step}")
        assert in_child(killed_at, step, index_folder, folder) == -signal.SIGKILL
        try:
            index = ShardIndex.open(folder)
        except ConfigError as error:
            outcomes.add("old" if f"does not know {shard}" in str(error) else str(error))
            continue
        assert [index.read(1, number).key for number in range(4)] == ["k4", "k5", "k6", "k7"]
        outcomes.add("new")
        (folder / shard).unlink()
        index_folder(folder)  # of another content: nothing of the killed one stays
        assert len(list(folder.iterdir())) == 3
    assert outcomes == {"old", "new"}


@pytest.mark.parametrize("deleted", [[0], [1], [0, 1], [2]])
def test_deleted_shards_come_back_and_the_others_stay(tmp_path, deleted):
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


def test_a_shard_of_another_process_is_not_written_over(tmp_path):
    other = tmp_path / "shard-000000.tar"
    with pytest.raises(ConfigError, match=r"shard-000000\.tar: was written by another process"):
        write(tmp_path, before=lambda number: other.write_bytes(b"theirs") if number == 3 else None)
    assert files(tmp_path) == {other.name: b"theirs"}


@pytest.mark.parametrize("limit", [0, 300, 4000, 20_000, 23_000])
def test_room_for_so_many_bytes_of_a_file(tmp_path, limit):
    write(tmp_path / "whole")
    whole, folder = files(tmp_path / "whole"), tmp_path / "limited"
    assert max(len(data) for data in whole.values()) > 23_000

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            write(folder)
        except ConfigError as error:
            os._exit(7 if "File too large" in str(error) else 8)

    assert in_child(limited) == 7
    require_whole(folder, whole)
    assert not [name for name in files(folder) if name.endswith(".tar.tmp")]
    write(folder)
    assert files(folder) == whole
