from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made_shards import cut, jpeg, write, write_tar

from data_tools.parallel import in_order
from data_tools.scan.shard_reader import ShardReader, scan, shards_of
from vlp.config import ConfigError
from vlp.data.shards.sample_files import BadSample
from vlp.io import atomic_write

PROGRAM = """
import os, sys, time
from data_tools import parallel as scan

def work(number):
    open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
    while number:  # the first job alone has an end
        scan.go_on()
        time.sleep(0.01)

for _ in scan.in_order(work, range(9), 3):
    print("first", flush=True)
"""


def double(number: int) -> int:
    time.sleep(0.002 * (number % 3))
    return 2 * number


def fail(number: int) -> int:
    if number == 5:
        raise ConfigError("five")
    return number


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_results_come_in_the_order_of_the_jobs(processes: int) -> None:
    assert list(in_order(double, range(40), processes)) == [2 * n for n in range(40)]
    assert list(in_order(double, [], processes)) == []
    assert list(in_order(double, [4], processes)) == [8]


def test_jobs_are_taken_as_they_are_needed() -> None:
    taken = []

    def jobs() -> object:
        for number in range(1000):
            taken.append(number)
            yield number

    results = in_order(double, jobs(), 2)  # type: ignore[arg-type]
    assert next(results) == 0
    assert len(taken) < 20
    results.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_failure_of_the_work_is_its_own(processes: int) -> None:
    with pytest.raises(ConfigError, match="five"):
        list(in_order(fail, range(40), processes))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 1), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_no_process_outlives_the_command(tmp_path: Path, number: int, code: int) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"first\n"
    while len(list(tmp_path.iterdir())) < 3:
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(timeout=120) in (code, -number)
    workers = [path.name for path in tmp_path.iterdir()]
    deadline = time.monotonic() + 60
    while any(map(runs, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(process: str) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_shards_are_read_in_order(tmp_path: Path) -> None:
    first = write(tmp_path / "b", {f"k{n}": jpeg(n) for n in range(5)}, 2)
    second = write(tmp_path / "a", {"x": jpeg(9)})
    shards = shards_of([first, second])
    names = ["shard-000000.tar", "shard-000001.tar", "shard-000002.tar", "shard-000000.tar"]
    assert [shard.name for shard in shards] == names
    assert [shard.folder for shard in shards] == [first] * 3 + [second]
    counts = [count for _, count in scan(_count, shards, 2, "count")]
    assert counts == [2, 2, 1, 1]
    with ShardReader(shards[0].path) as reader:
        sample = reader.read(1)
        assert (sample.key, sample.image) == ("k1", jpeg(1))
        assert reader.annotation(1) == sample.annotation


def test_damaged_and_missing_shards(tmp_path: Path) -> None:
    folder = write(tmp_path / "b", {f"k{n}": jpeg(n) for n in range(3)})
    path = folder / "shard-000000.tar"
    with ShardReader(path) as reader:
        path.write_bytes(path.read_bytes()[:700])
        with pytest.raises(BadSample, match="cut off"):
            reader.read(0)
    write_tar(path, [("a.jpg", jpeg(1)), ("b.jpg", jpeg(2))])
    cut(path)
    with ShardReader(path) as reader:
        assert len(reader) == 1
        assert reader.problem
    with ShardReader(tmp_path / "gone.tar") as reader:
        assert (len(reader), reader.missing) == (0, True)


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "b", {"k": jpeg(0)})
    for folders, message in (
        ([tmp_path / "gone"], "no such folder"),
        ([tmp_path], "holds no shards"),
        ([folder, tmp_path / "." / "b"], "given twice"),
    ):
        with pytest.raises(ConfigError, match=message):
            shards_of(folders)
    with pytest.raises(ConfigError, match="--processes is 0"):
        list(in_order(double, [1], 0))


def write_half(path: Path) -> None:
    with atomic_write(path, error=ConfigError) as file:
        file.write(b"half")
        raise KeyError


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with pytest.raises(KeyError):
        write_half(path)
    assert list(path.parent.iterdir()) == []
    with atomic_write(path, error=ConfigError) as file:
        file.write(b"whole")
        assert not path.exists()
    assert [each.read_bytes() for each in path.parent.iterdir()] == [b"whole"]
    with pytest.raises(ConfigError, match=r"file/below: cannot be written"):
        write_half(path / "below")


def _count(shard: object) -> int:
    with ShardReader(shard.path) as reader:  # type: ignore[attr-defined]
        return len(reader)
