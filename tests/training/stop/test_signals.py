"""Processes that are asked to end, and cannot all say so themselves."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from vlp.training.stop.signals import REQUEUE, StopSignals

# The main thread waits for a lock in C, as in a collective call; no handler can run.
BLOCKED = """
import ctypes, sys
from vlp.training.stop.signals import StopSignals
lock = ctypes.create_string_buffer(128)
with StopSignals(grace=1.0) as stop:
    if sys.argv[1] == "training":
        stop.look()
    print("waits", flush=True)
    ctypes.CDLL(None).pthread_mutex_lock(lock)
    ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


@contextmanager
def waiting(phase: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, phase],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.parametrize(
    ("phase", "told"),
    [("start", "before its first step"), ("training", "in the midst of a step")],
)
def test_a_blocked_process_ends_itself(phase: str, told: str, number: signal.Signals) -> None:
    with waiting(phase) as process:
        process.send_signal(number)
        _, said = process.communicate(timeout=20)
        assert process.returncode == REQUEUE
        assert said == f"rank 0 stopped by {number.name} {told}\n"


def test_a_run_that_is_being_saved_takes_its_time() -> None:
    with StopSignals(grace=0.1) as stop:
        stop.look()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.look()
        stop.hold()
        time.sleep(1.5)
    assert stop.reason == "SIGTERM"


def test_the_grace_begins_anew_after_validating_or_saving() -> None:
    with StopSignals(grace=0.5) as stop:
        stop.look()
        with stop.patient():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(2.0)
        time.sleep(0.2)
        assert stop.look()


IN_PATIENCE = """
import os, signal, sys, time
from vlp.training.stop.signals import StopSignals
with StopSignals(grace=0.2, patience=float(sys.argv[1])) as stop:
    stop.look()
    with stop.patient():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(float(sys.argv[2]))
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("patience", "inside", "told"),
    [(0.5, 60.0, "while it validated or saved"), (60.0, 0.5, "in the midst of a step")],
)
def test_patience_ends(patience: float, inside: float, told: str) -> None:
    command = [sys.executable, "-c", IN_PATIENCE, str(patience), str(inside)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (REQUEUE, f"rank 0 stopped by SIGTERM {told}\n")


def test_a_process_with_many_open_files_is_watched() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while files[-1] < 1024:
            files.append(os.dup(files[0]))
        with StopSignals() as stop:
            stop.look()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
            assert stop._thread.is_alive()
            assert stop.look()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_forked_process_does_not_stop_the_one_it_came_from() -> None:
    with StopSignals() as stop:
        stop.look()
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        time.sleep(0.5)
        assert not stop.look()


def test_what_was_there_before_is_there_after() -> None:
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) != handlers[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert signal.set_wakeup_fd(-1) == -1
    assert all(thread.name != "stop" for thread in threading.enumerate())
