import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from vlp import lock
from vlp.config import ConfigError
from vlp.lock import FolderLock

IN_USE = r"is being written by process (\d+) on \S+ since \d{4}-.*; wait for its end"
fork = multiprocessing.get_context("fork")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "STALE_SECONDS", 0.5)


def lock_file(folder):
    [path] = folder.glob(".lock-*")
    return path


def hold(folder, ready, more=lambda: None):
    with FolderLock(folder):
        more()
        ready.set()  # type: ignore[attr-defined]
        time.sleep(60)


def holder(folder, more=lambda: None):
    ready = fork.Event()
    process = fork.Process(target=hold, args=(folder, ready, more))
    process.start()
    assert ready.wait(10)
    return process  # type: ignore[return-value]


def test_one_owner_who_is_named_and_leaves_nothing(tmp_path):
    folder = tmp_path / "deep" / "run"
    for _ in range(2):
        with FolderLock(folder):
            with pytest.raises(ConfigError, match=IN_USE) as refused, FolderLock(folder):
                raise AssertionError("two owners")
            assert f"process {os.getpid()} " in str(refused.value)
            assert lock.is_lock(lock_file(folder))
    assert not folder.exists(), "it was made for the lock alone"
    with pytest.raises(ConfigError, match=r"cannot be written \(File name too long\)"):
        FolderLock(folder / ("a" * 300))
    with FolderLock(folder):
        (folder / "shard").touch()
    assert [path.name for path in folder.iterdir()] == ["shard"]


def test_another_process_is_refused_at_once_until_it_is_killed(tmp_path):
    process = holder(tmp_path)
    start = time.monotonic()
    with pytest.raises(ConfigError, match=f"process {process.pid} "):
        FolderLock(tmp_path)
    assert time.monotonic() - start < 2
    process.kill()
    process.join()
    assert lock_file(tmp_path).exists()
    with FolderLock(tmp_path):
        assert json.loads(lock_file(tmp_path).read_text())["process"] == os.getpid()
    assert not any(tmp_path.iterdir())


def test_workers_of_a_killed_owner_are_waited_for(tmp_path):
    worker = tmp_path / "worker"

    def fork_one():
        process = fork.Process(target=time.sleep, args=(60,))
        process.start()
        worker.write_text(str(process.pid))

    process = holder(tmp_path / "run", fork_one)
    process.kill()
    process.join()
    threading.Timer(0.7, os.kill, (int(worker.read_text()), signal.SIGKILL)).start()
    start = time.monotonic()
    with FolderLock(tmp_path / "run"):
        assert 0.5 < time.monotonic() - start < 10


def test_a_process_of_the_same_number_is_another_one(tmp_path):
    """Where the disk knows no locks, the start of the process tells them apart."""
    mine = {"process": os.getpid(), "started": lock._start_time(os.getpid())}
    assert lock._is_running(mine)
    assert not lock._is_running(mine | {"started": mine["started"] - 1})
    assert not lock._is_running({})
    ended = subprocess.Popen(["true"])
    time.sleep(0.2)  # it is a zombie now, whose start can be read
    assert not lock._is_running({"process": ended.pid, "started": lock._start_time(1)})
    assert lock._start_time(ended.pid) is None
    ended.wait()


@pytest.mark.parametrize("content", ["", "no JSON", "[1]", '{"host": "node7", "process": 12}'])
def test_another_machine_that_beats_is_the_owner(tmp_path, quick, content):
    other = tmp_path / ".lock-node7-1234"
    other.write_text(content)
    stop = threading.Event()

    def beat():
        while not stop.wait(0.05):
            os.utime(other)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(ConfigError, match=r"is being written by process (12|\?) on (node7|\?)"):
            FolderLock(tmp_path)
    finally:
        stop.set()
        beating.join()
    assert [*tmp_path.iterdir()] == [other], "the loser takes its own file away"
    start = time.monotonic()
    with FolderLock(tmp_path):  # it was killed, and is waited for until it is stale
        assert time.monotonic() - start < 5
        assert not other.exists()


def test_an_old_lock_of_another_machine_is_stale_at_once(tmp_path):
    other = tmp_path / ".lock-node7-1234"
    other.touch()
    os.utime(other, (1, 1))
    start = time.monotonic()
    with FolderLock(tmp_path):
        assert time.monotonic() - start < 2
        assert not other.exists()


def test_the_owner_beats_and_ends_when_another_machine_has_taken_over(tmp_path, quick):
    process = holder(tmp_path)
    path = lock_file(tmp_path)
    first = path.stat().st_mtime
    time.sleep(0.3)
    assert path.stat().st_mtime > first
    (tmp_path / ".lock-node7-1234").touch()
    path.unlink()
    process.join(10)
    assert process.exitcode == 1


def test_processes_of_one_start_are_let_in_one_by_one(tmp_path):
    """Each adds 1 to a number, read and written with a pause between."""
    count = tmp_path / "count"
    count.write_text("0")
    program = (
        "import sys, time; from pathlib import Path; from vlp.lock import FolderLock\n"
        "from vlp.config import ConfigError\n"
        "folder, count, done = Path(sys.argv[1]), Path(sys.argv[2]), 0\n"
        "while done < 20:\n"
        "    try:\n"
        "        with FolderLock(folder):\n"
        "            number = int(count.read_text()); time.sleep(0.002)\n"
        "            count.write_text(str(number + 1)); done += 1\n"
        "    except ConfigError: time.sleep(0.001)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run"), str(count)]
    started = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    assert count.read_text() == "60"
