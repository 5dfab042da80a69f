"""Executors: results, order, retries, ledger, and what is left of them when they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_tools.executor.local import LocalExecutor
from vlp.config import ConfigError

PROGRAM = """
import os, sys, time
from data_tools.executor.executor import go_on
from data_tools.executor.local import LocalExecutor

def work(number):
    open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
    while number:  # the first job alone has an end
        go_on()
        time.sleep(0.01)

for _ in LocalExecutor(3).map(work, range(9)):
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
    assert list(LocalExecutor(processes).map(double, range(40))) == [2 * n for n in range(40)]
    assert list(LocalExecutor(processes).map(double, [])) == []
    assert list(LocalExecutor(processes).map(double, [4])) == [8]


def test_jobs_are_taken_as_they_are_needed() -> None:
    taken = []

    def jobs() -> object:
        for number in range(1000):
            taken.append(number)
            yield number

    results = LocalExecutor(2).map(double, jobs())  # type: ignore[arg-type]
    assert next(results) == 0
    assert len(taken) < 20
    results.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_failure_of_the_work_is_its_own(processes: int) -> None:
    with pytest.raises(ConfigError, match="five"):
        list(LocalExecutor(processes).map(fail, range(40)))


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


def test_wrong_executors_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(ConfigError, match="--processes is 0"):
        LocalExecutor(0)
