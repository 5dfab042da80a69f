"""Two agents of torchrun play two nodes; one dies, and the run goes on without it by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ranks
import torch
from launch_lab import CHECKPOINT_EVERY, Lab

pytestmark = pytest.mark.nightly

COMMAND = ranks.ROOT / "launch" / "pretrain.py"
STEPS = 80


def agents(lab: Lab, name: str) -> list[subprocess.Popen[bytes]]:
    """Start one agent a node; the first keeps the rendezvous."""
    endpoint = f"127.0.0.1:{ranks.free_port()}"
    more = (f"training.steps={STEPS}", "training.keep_last=100", "--resume")
    started = []
    for node in range(2):
        rendezvous = f"is_host={str(node == 0).lower()},last_call_timeout=5"
        with (lab.folder / f"said_{node}.txt").open("wb") as file:
            started.append(
                subprocess.Popen(
                    [
                        *(Path(sys.executable).with_name("torchrun"), "--nnodes", "1:2"),
                        *("--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "elastic"),
                        *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint),
                        *("--rdzv-conf", rendezvous),
                        *(COMMAND, *lab.arguments(name, *more)),
                    ],
                    env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
                    | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                    cwd=ranks.ROOT,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    return started


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all below it, as when a machine fails."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        member.kill()
    process.wait()


def test_a_run_goes_on_without_a_node(lab: Lab) -> None:
    first, second = agents(lab, "elastic")
    try:
        began = time.monotonic()
        while max(lab.saved_steps("elastic"), default=0) < CHECKPOINT_EVERY:
            assert first.poll() is None, (lab.folder / "said_0.txt").read_text()
            assert time.monotonic() - began < 120
            time.sleep(0.02)
        kill(second)
        lost = time.monotonic()
        assert first.wait(timeout=200) == 0, (lab.folder / "said_0.txt").read_text()
        print(f"finished {time.monotonic() - lost:.0f} s after the loss of a node")
    finally:
        for agent in (first, second):
            if agent.poll() is None:
                kill(agent)
    report = lab.report("elastic")
    [step] = report["resumed_at_steps"]
    assert CHECKPOINT_EVERY <= step < STEPS
    assert report["ranks"] == 1
    assert report["samples"] == report["trained_samples"] == 8 * STEPS

    # Two ranks to that step and one from there, without faults.
    more = (f"training.steps={STEPS}", "training.keep_last=100", "training.checkpoint_every=1")
    ranks.run([COMMAND, *lab.arguments("elastic_before", *more)], 2)
    lab.begin_with("elastic_before", step, "elastic_after")
    ranks.run([COMMAND, *lab.arguments("elastic_after", *more, "--resume")], 1)
    found, expected = lab.weights("elastic", STEPS), lab.weights("elastic_after", STEPS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
