"""Trainings of a comparison end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from evaluation.ablations.runs import Run, do_runs
from vlp.config import ConfigError

TRAINING = """
import os, sys, time
[output] = [word.partition("=")[2] for word in sys.argv if word.startswith("output=")]
os.makedirs(output, exist_ok=True)
with open(os.path.join(output, "pids"), "w") as file:
    print(os.getpid(), os.getppid(), file=file, flush=True)
time.sleep(300)
"""

FAILING = """
import os, sys, time
[output] = [word.partition("=")[2] for word in sys.argv if word.startswith("output=")]
other = os.path.join(os.path.dirname(output), "1")
if output.endswith("0"):  # fails when the one beside it has begun
    while not os.path.exists(other):
        time.sleep(0.05)
    sys.exit(3)
os.makedirs(output, exist_ok=True)
time.sleep(300)
"""

COMPARISON = """
import sys
from pathlib import Path
from evaluation.ablations.runs import Run, do_runs

if __name__ == "__main__":
    out, script = Path(sys.argv[1]), sys.argv[2]
    settings = {"config": "none.yaml", "overrides": {}}
    do_runs([Run(f"{n}", out / str(n), settings, script) for n in range(3)], 1, None)
"""


def _running(pid: int) -> bool:
    """Not gone, and no zombie that nobody has asked after."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _until(what: str, holds: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process of its parent's end"
)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_comparison_that_is_killed_leaves_no_training(tmp_path: Path, how: int) -> None:
    script, main = tmp_path / "training.py", tmp_path / "comparison.py"
    script.write_text(TRAINING)
    main.write_text(COMPARISON)
    root = str(Path(__file__).parents[3])
    comparison = subprocess.Popen(
        [sys.executable, str(main), str(tmp_path / "runs"), str(script)],
        env={**os.environ, "PYTHONPATH": root},
        start_new_session=True,
    )
    try:
        pids = tmp_path / "runs" / "0" / "pids"
        _until(
            "the first training starts", lambda: pids.is_file() and pids.read_text().endswith("\n")
        )
        started = [int(pid) for pid in pids.read_text().split()]
        comparison.send_signal(how)
        comparison.wait(60)
        _until("training and worker end", lambda: not any(map(_running, started)), 30)
        time.sleep(0.5)
        assert not (tmp_path / "runs" / "1").exists(), "the next one in the queue was started"
    finally:
        if comparison.poll() is None:
            os.killpg(comparison.pid, signal.SIGKILL)


@pytest.mark.integration
def test_a_failed_training_is_named_and_ends_those_beside_it(tmp_path: Path) -> None:
    script, out = tmp_path / "training.py", tmp_path / "runs"
    script.write_text(FAILING)
    settings = {"config": "none.yaml", "overrides": {}}
    runs = [Run(f"run {n}", out / str(n), settings, str(script)) for n in range(4)]
    said: list[str] = []
    started = time.monotonic()
    with pytest.raises(ConfigError, match="run 0 ended with code 3; see ") as error:
        do_runs(runs, 2, None, said.append)
    assert error.value.__notes__ == [f"This was run 0, in {out / '0'}."]
    assert said == ["4 runs, 0 of them done"]
    assert time.monotonic() - started < 100, "the one beside it was waited for"
    assert not (out / "3").exists(), "the last one in the queue was started"
