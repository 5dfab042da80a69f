"""Start a script as several ranks on this machine, without a launcher.

Ranks are forked from a server that has imported PyTorch, DeepSpeed and timm once, which is most of
a start on a CPU. What is left is real: own processes, exit codes, signals and sockets.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_server = multiprocessing.get_context("forkserver")
# Imported once; none of them starts threads or process groups.
_PRELOADED = [
    "deepspeed",
    "torch.utils.tensorboard",
    "vlp.data.pretrain",
    "vlp.tasks.pretraining",
    "vlp.training.command",
    "vlp.training.engines.deepspeed",
    "vlp.training.loop",
]
_server.set_forkserver_preload(_PRELOADED)
# The server inherits these, before it imports DeepSpeed.
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("OMP_NUM_THREADS", "1")


@dataclass
class Rank:
    process: BaseProcess
    output: Path


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(command, world_size):
    """One process per rank; standard output and error of each go to one file."""
    port, folder = free_port(), Path(tempfile.mkdtemp())
    started = []
    for rank in range(world_size):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
        }
        output = folder / f"rank_{rank}.txt"
        output.touch()  # it may be killed before it says a word
        process = _server.Process(
            target=_become, args=([str(part) for part in command], environment, output)
        )
        process.start()
        started.append(Rank(process, output))
    return started


def _become(command, environment, output):
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch

    os.environ.update(environment)
    os.chdir(ROOT)
    # The server's streams are block-buffered, and a rank that fails leaves without flushing.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    # At once, unless somebody else in this process started the server, with other modules.
    for module in _PRELOADED:
        importlib.import_module(module)
    # As in a process of its own on Linux; else its loader workers come from another server.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")


def finish(ranks, timeout=400):
    end = time.monotonic() + timeout
    late = []
    for rank, started in enumerate(ranks):
        started.process.join(max(0.0, end - time.monotonic()))
        if started.process.is_alive():
            late.append(rank)
            started.process.kill()
            started.process.join()
    results = [
        (started.process.exitcode or 0, started.output.read_text(errors="replace"))
        for started in ranks
    ]
    assert not late, f"ranks {late} did not end within {timeout} s:\n{results}"
    return results


def run(command, world_size=1):
    """Run to the end; all ranks must succeed. Returns rank 0's output."""
    results = finish(start(command, world_size))
    for rank, (code, output) in enumerate(results):
        assert code == 0, f"rank {rank} of {world_size} ended with {code}:\n{output}"
    return results[0][1]
