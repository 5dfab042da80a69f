"""Slurm arrays under stand-ins for `sbatch` and `scancel` that run and end their tasks here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from every_tool import sources
from slurm_jobs import die, fail

from data_tools.__main__ import main
from data_tools.executor import slurm
from data_tools.executor.slurm import SlurmExecutor
from vlp.config import ConfigError

SBATCH = """#!/bin/bash
for word in "$@"; do
  case $word in
    --array=0-*) last=${word#--array=0-} ;;
    --wrap=*) wrap=${word#--wrap=} ;;
    --output=*) output=${word#--output=} ;;
  esac
done
echo "$@" >> "$CALLED"
trap 'kill $(jobs -p)' TERM
for task in $(seq 0 "$last"); do
  SLURM_ARRAY_TASK_ID=$task SLURM_ARRAY_TASK_COUNT=$((last + 1)) \\
    bash -c "exec $wrap" > "${output/\\%a/$task}" 2>&1 &
done
echo $$
wait
"""
SCANCEL = """#!/bin/bash
kill -TERM "$1"
"""
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says how `sbatch` was called."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("sbatch", SBATCH), ("scancel", SCANCEL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLED", str(tmp_path / "called"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "called"


def test_arrays_give_what_processes_give(
    tmp_path: Path, called: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = sources(tmp_path) / "first"
    reports = []
    for place in ("local", "slurm"):
        monkeypatch.setenv("VLP_EXECUTOR", place)
        report = tmp_path / f"{place}.txt"
        assert main(["verify", str(folder), "--report", str(report), "--processes", "2"]) == 1
        reports.append(report.read_text())
    assert reports[0] == reports[1]
    assert "corrupt shard" in reports[0]
    [call] = called.read_text().splitlines()
    assert "--array=0-1 " in call
    assert not list(tmp_path.glob(".vlp-tasks-*"))


def test_lost_tasks_are_done_again(
    tmp_path: Path, called: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "RETRIES", 1)
    jobs = [tmp_path / f"{number}" for number in range(3)]
    for job, count in zip(jobs, (0, 1, 0)):
        job.write_text(str(count))
    executor = SlurmExecutor(2)
    assert list(executor.map(die, jobs)) == ["0", "1", "2"]
    assert [job.read_text() for job in jobs] == ["-1", "-1", "-1"]
    arrays = [call.split("--array=")[1].split()[0] for call in called.read_text().splitlines()]
    assert arrays == ["0-1", "0-0"]
    jobs[1].write_text("99")
    with pytest.raises(ConfigError, match=rf"died at {jobs[1]}, 2 times"):
        list(executor.map(die, jobs))
    assert not list(tmp_path.glob(".vlp-tasks-*"))


def test_an_error_of_the_work_is_its_own(called: Path) -> None:
    with pytest.raises(ConfigError, match="one"):
        list(SlurmExecutor(1).map(fail, range(3)))
    assert len(called.read_text().splitlines()) == 1


PROGRAM = """
import os, time
from pathlib import Path
from data_tools.executor.slurm import SlurmExecutor
from slurm_jobs import hang
list(SlurmExecutor(2).map(hang, [Path("a"), Path("b")]))
"""


def test_ctrl_c_cancels_the_array(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent), *sys.path])
    command = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": paths},
        stderr=subprocess.DEVNULL,
    )
    marks = [tmp_path / "a", tmp_path / "b"]
    while not all(mark.exists() and mark.read_text() for mark in marks):
        assert command.poll() is None
        time.sleep(0.05)
    command.send_signal(signal.SIGINT)
    assert command.wait(timeout=60) != 0
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{mark.read_text()}").exists() for mark in marks):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not list(tmp_path.glob(".vlp-tasks-*"))
