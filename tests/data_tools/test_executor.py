import operator
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from every_tool import run_every_tool, sources

from data_tools import verify
from data_tools.__main__ import main
from data_tools.executor import Executor, _defer_sigint, open_ledger
from vlp.config import ConfigError

PROGRAM = """
import os, sys, time
from data_tools.executor import raise_if_stopped
from data_tools.executor import Executor

def work(number):
    open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
    while number:  # the first job alone has an end
        raise_if_stopped()
        time.sleep(0.01)

for _ in Executor(3).map(work, range(9)):
    print("first", flush=True)
"""


def double(number):
    time.sleep(0.002 * (number % 3))
    return 2 * number


def fail(number):
    if number == 5:
        raise ConfigError("five")
    return number


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_results_come_in_the_order_of_the_jobs(processes):
    assert list(Executor(processes).map(double, range(40))) == [2 * n for n in range(40)]
    assert list(Executor(processes).map(double, [])) == []
    assert list(Executor(processes).map(double, [4])) == [8]


def test_jobs_are_taken_as_they_are_needed():
    taken = []

    def jobs():
        for number in range(1000):
            taken.append(number)
            yield number

    results = Executor(2).map(double, jobs())  # type: ignore[arg-type]
    assert next(results) == 0
    assert len(taken) < 20
    results.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("spawn", [False, True])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_failure_of_the_work_is_its_own(processes, spawn):
    with pytest.raises(ConfigError, match="five"):
        list(Executor(processes, spawn).map(fail, range(40)))


def state(number):
    return os.getpid(), hasattr(operator, "of_the_parent")


@pytest.mark.parametrize("processes", [1, 2])
def test_fresh_processes_have_nothing_of_this_one(processes, monkeypatch):
    monkeypatch.setattr(operator, "of_the_parent", 1, raising=False)
    assert list(Executor(processes).map(state, [0])) == [(os.getpid(), True)]
    found = list(Executor(processes, spawn=True).map(state, range(4)))
    assert os.getpid() not in dict(found)
    assert not any(copied for _, copied in found)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 1), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_no_process_outlives_the_command(tmp_path, number, code):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"first\n"
    while len(list(tmp_path.iterdir())) < 3:
        time.sleep(0.01)
    workers = [psutil.Process(int(path.name)) for path in tmp_path.iterdir()]
    process.send_signal(number)
    assert process.wait(timeout=120) in (code, -number)
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert all(worker.status() == psutil.STATUS_ZOMBIE for worker in alive)


def test_an_interrupt_waits_for_the_start_of_a_pool():
    end, steps = threading.Event(), []

    def start():
        with _defer_sigint():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            steps.append("started")

    # This thread would receive a signal that the main thread masks.
    threading.Thread(target=end.wait, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        start()
    end.set()
    assert steps == ["started"]


def test_every_tool_gives_the_same_with_one_and_two_processes(tmp_path):
    given = sources(tmp_path)
    one = run_every_tool(given, tmp_path / "one", "--processes", "1")
    assert len(one) > 20
    assert run_every_tool(given, tmp_path / "two", "--processes", "2") == one


def once(job):
    with job.open("a") as file:
        file.write("done ")
    if job.name == "7" and not (job.parent / "go").exists():
        raise ConfigError("seven")
    return job.name


@pytest.mark.parametrize("processes", [1, 2])
def test_finished_tasks_are_not_done_again(tmp_path, processes):
    jobs = [tmp_path / str(number) for number in range(10)]
    executor, folder = Executor(processes), tmp_path / "ledger"

    def run():
        with open_ledger(folder) as ledger:
            return list(executor.map(once, jobs, ledger=ledger))

    for _ in range(2):
        with pytest.raises(ConfigError, match="seven"):
            run()
    assert jobs[7].read_text() == "done done "
    (tmp_path / "go").touch()
    assert run() == [str(number) for number in range(10)]
    assert not folder.exists()
    assert jobs[7].read_text() == "done done done "


def test_a_changed_file_is_another_task(tmp_path):
    job = tmp_path / "shard"
    job.write_text("one")
    with open_ledger(tmp_path / "ledger") as ledger:
        map_ = partial(Executor(1).map, ledger=ledger)
        assert list(map_(Path.read_text, [job])) == ["one"]
        assert len(list(ledger.iterdir())) == 1
        job.write_text("two!")
        assert list(map_(Path.read_text, [job])) == ["two!"]
        assert list(map_(Path.read_bytes, [job])) == [b"two!"]
        assert len(list(ledger.iterdir())) == 3


def test_a_stopped_check_goes_on(tmp_path, monkeypatch):
    folder, report = sources(tmp_path) / "first", tmp_path / "report"
    command = ["verify", str(folder), "--report", str(report), "--processes", "1"]
    assert main(command) == 1
    whole, decode, calls = report.read_text(), verify.decode_image, []

    def stopped(data, where):
        calls.append(where)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return decode(data, where)

    monkeypatch.setattr(verify, "decode_image", stopped)
    assert main(command) == 130
    assert main(command) == 1
    assert report.read_text() == whole
    # Of 30 images 18 lay in finished shards.
    assert len(calls) == 20 + 12
