"""Real processes that carry the names of launchers, and are killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

CHILD = """
import os, time
from pathlib import Path
from vlp.training.stop_requests import Launchers
{wait}
launchers = Launchers()
Path("child").write_text(str(os.getpid()))
while not launchers.lost():
    time.sleep(0.05)
Path("lost").write_text("")
"""
START = """
import subprocess, sys
subprocess.call(["bash", "-c", f"{sys.executable} child.py; true"])
"""


def until(true: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def family(tmp_path: Path) -> Callable[..., list[psutil.Process]]:
    """Start bash - launcher - bash - child; returns them once the child has looked around."""

    def start(launcher: str, **more: str) -> list[psutil.Process]:
        (tmp_path / "child.py").write_text(CHILD.format(wait=""))
        (tmp_path / launcher).write_text(START)
        subprocess.Popen(
            ["bash", "-c", f"{sys.executable} {launcher}; true"],
            cwd=tmp_path,
            env=os.environ | more,
        )
        until(lambda: (tmp_path / "child").exists() and bool((tmp_path / "child").read_text()))
        child = psutil.Process(int((tmp_path / "child").read_text()))
        return [child, *child.parents()[:3]]

    return start


@pytest.mark.parametrize("dies", [1, 2])
def test_a_shell_between_and_the_launcher_are_missed(
    dies: int, family: Callable[..., list[psutil.Process]], tmp_path: Path
) -> None:
    family("torchrun")[dies].kill()
    until((tmp_path / "lost").exists)


def test_a_shell_above_the_launcher_is_not_missed(
    family: Callable[..., list[psutil.Process]], tmp_path: Path
) -> None:
    _, _, launcher, shell = family("torchrun")
    shell.kill()
    time.sleep(0.5)
    assert not (tmp_path / "lost").exists()
    launcher.kill()
    until((tmp_path / "lost").exists)


def test_a_launcher_of_unknown_name_is_known_by_what_it_sets(
    family: Callable[..., list[psutil.Process]], tmp_path: Path
) -> None:
    family("agent", TORCHELASTIC_RUN_ID="1")[1].kill()
    until((tmp_path / "lost").exists)


def test_without_a_launcher_nothing_is_missed(
    family: Callable[..., list[psutil.Process]], tmp_path: Path
) -> None:
    child, *above = family("script")
    for process in reversed(above):  # from the top: whoever's child dies ends by itself
        process.kill()
    time.sleep(0.5)
    assert child.is_running()
    assert not (tmp_path / "lost").exists()
    child.kill()


def test_a_launcher_that_ends_early_is_missed(tmp_path: Path) -> None:
    first = psutil.Process(1).name()
    if first in ("sh", "bash", "dash") or first.startswith("python"):
        pytest.skip(f"the first process, {first}, may start ranks itself")
    waits = 'while os.getppid() != 1:\n    time.sleep(0.02)\nos.environ["CROSS_SIZE"] = "1"'
    (tmp_path / "child.py").write_text(CHILD.format(wait=waits))
    leaves = f"{sys.executable} child.py & sleep 0.1"
    subprocess.run(["bash", "-c", leaves], cwd=tmp_path, check=True)
    until((tmp_path / "lost").exists)
