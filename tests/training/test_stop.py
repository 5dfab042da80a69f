import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import ranks

from vlp.training.stop_requests import REQUEUE, StopSignals

# The main thread waits for a lock in C, as in a collective call; no handler can run.
BLOCKED = """
import ctypes, os, sys, threading
from vlp.training.stop_requests import StopSignals
lock = ctypes.create_string_buffer(128)
with StopSignals(grace=1.0) as stop:
    if sys.argv[1] == "training":
        stop.should_stop()
    threading.Timer(0.5, os.kill, (os.getpid(), int(sys.argv[2]))).start()
    ctypes.CDLL(None).pthread_mutex_lock(lock)
    ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


def outcome(script, *arguments):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=20, check=False, preexec_fn=heed_signals
    )
    return done.returncode, done.stderr


def heed_signals():
    """Undo what a child inherits of `nohup` and of a shell's `&`."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize(
    ("phase", "told"), [("start", "before its first step"), ("training", "in the midst of a step")]
)
def test_a_blocked_process_ends_itself(phase, told, number):
    message = f"rank 0 stopped by {number.name} {told}\n"
    assert outcome(BLOCKED, phase, int(number)) == (REQUEUE, message)


def test_a_run_that_is_being_saved_takes_its_time():
    with StopSignals(grace=0.1) as stop:
        stop.should_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.should_stop()
        stop.disable_deadline()
        time.sleep(1.5)
    assert stop.reason == "SIGTERM"


def test_the_grace_begins_anew_after_validating_or_saving():
    with StopSignals(grace=0.5) as stop:
        stop.should_stop()
        with stop.suspend_deadline():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(2.0)
        time.sleep(0.2)
        assert stop.should_stop()


IN_PATIENCE = """
import os, signal, sys, time
from vlp.training.stop_requests import StopSignals
with StopSignals(grace=0.2, patience=float(sys.argv[1])) as stop:
    stop.should_stop()
    with stop.suspend_deadline():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(float(sys.argv[2]))
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("patience", "inside", "told"),
    [(0.5, 60.0, "while it validated or saved"), (60.0, 0.5, "in the midst of a step")],
)
def test_patience_ends(patience, inside, told):
    code, error = outcome(IN_PATIENCE, patience, inside)
    after = (
        f"SIGTERM: the run stops after this validation or checkpoint, in {patience:.0f} s at most"
    )
    assert (code, error) == (REQUEUE, f"{after}\nrank 0 stopped by SIGTERM {told}\n")


def test_a_process_with_many_open_files_is_watched():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while files[-1] < 1024:
            files.append(os.dup(files[0]))
        with StopSignals() as stop:
            stop.should_stop()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
            assert stop._thread.is_alive()
            assert stop.should_stop()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_forked_process_does_not_stop_the_one_it_came_from():
    with StopSignals() as stop:
        stop.should_stop()
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        time.sleep(0.5)
        assert not stop.should_stop()


def test_what_was_there_before_is_there_after():
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) != handlers[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert signal.set_wakeup_fd(-1) == -1
    assert all(thread.name != "stop" for thread in threading.enumerate())


CHILD = """
import os, time
from vlp.training.stop_requests import StopSignals
with StopSignals() as stop:
    print(os.getpid(), flush=True)
    while not stop.should_stop():
        time.sleep(0.05)
    print(stop.reason, flush=True)
"""


@pytest.mark.parametrize("launched", [True, False])
def test_a_rank_ends_with_its_launcher_but_not_with_a_shell(launched):
    parent = subprocess.Popen(
        ["bash", "-c", f"{sys.executable} -c '{CHILD}'; true"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | ({"TORCHELASTIC_RUN_ID": "1"} if launched else {}),
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    if not launched:
        time.sleep(2.5)  # it looks every second
        os.kill(child, signal.SIGTERM)
    reason = "the end of its launcher" if launched else "SIGTERM"
    assert parent.stdout.readline().strip() == reason


SCRIPT = Path(__file__).with_name("together_ranks.py")


@pytest.mark.nightly
def test_a_step_has_no_collective_call_but_the_engine_s(tmp_path):
    """Gradients and the map of unused parameters; a look at the others after 1, 2, 4, 8 steps."""
    results = ranks.finish(ranks.start([SCRIPT, tmp_path / "run"], 2))
    assert [code for code, _ in results] == [0, 0], results
    first, second = (json.loads(output.splitlines()[-1]) for _, output in results)
    assert first == second
    engine, look = {"gloo:all_reduce 0": 2}, {"gloo:all_reduce 1": 1}
    _, *steps = first["calls"]  # the first one holds the start
    looked = [number for number, calls in enumerate(steps, 1) if calls != engine]
    assert all(steps[number - 1] == engine | look for number in looked)
    gaps = [later - earlier for earlier, later in pairwise([0, *looked])]
    assert gaps[:2] == [2, 4]
    assert all(gap <= 2 * before for before, gap in pairwise(gaps))
    assert len(looked) < len(steps) / 4
    # Asked during step 20, ended at the next look.
    assert first["ended"] == "stopped"
    assert 20 < first["step"] < 60


LOST = """
import os, time
from pathlib import Path
from vlp.training.stop_requests import Launchers
{wait}
launchers = Launchers()
Path("child").write_text(str(os.getpid()))
while not launchers.is_lost():
    time.sleep(0.05)
Path("lost").write_text("")
"""
START = """
import subprocess, sys
subprocess.call(["bash", "-c", f"{sys.executable} child.py; true"])
"""


def until(true, seconds=20):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def family(tmp_path):
    """Child, bash, launcher and bash, once the child has looked around."""
    (tmp_path / "child.py").write_text(LOST.format(wait=""))
    (tmp_path / "torchrun").write_text(START)
    subprocess.Popen(["bash", "-c", f"{sys.executable} torchrun; true"], cwd=tmp_path)
    until(lambda: (tmp_path / "child").exists() and bool((tmp_path / "child").read_text()))
    child = psutil.Process(int((tmp_path / "child").read_text()))
    return [child, *child.parents()[:3]]


@pytest.mark.parametrize("dies", [1, 2])
def test_a_shell_between_and_the_launcher_are_missed(dies, family, tmp_path):
    family[dies].kill()
    until((tmp_path / "lost").exists)


def test_a_shell_above_the_launcher_is_not_missed(family, tmp_path):
    _, _, launcher, shell = family
    shell.kill()
    time.sleep(0.5)
    assert not (tmp_path / "lost").exists()
    launcher.kill()
    until((tmp_path / "lost").exists)


def test_a_launcher_that_ends_early_is_missed(tmp_path):
    first = psutil.Process(1).name()
    if first in ("sh", "bash", "dash") or first.startswith("python"):
        pytest.skip(f"the first process, {first}, may start ranks itself")
    waits = 'while os.getppid() != 1:\n    time.sleep(0.02)\nos.environ["CROSS_SIZE"] = "1"'
    (tmp_path / "child.py").write_text(LOST.format(wait=waits))
    leaves = f"{sys.executable} child.py & sleep 0.1"
    subprocess.run(["bash", "-c", leaves], cwd=tmp_path, check=True)
    until((tmp_path / "lost").exists)
