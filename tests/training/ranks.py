"""Start a script or a module as several ranks on this machine, without a launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(rank: int = 0, world_size: int = 1, port: int | None = None) -> dict[str, str]:
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or free_port()),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }


def start(command: Sequence[str | Path], world_size: int) -> list[subprocess.Popen[str]]:
    """One process per rank; standard output and error of each are one text."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=environment(rank, world_size, port),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]


def finish(
    processes: Sequence[subprocess.Popen[str]], timeout: float = 240
) -> list[tuple[int, str]]:
    """Exit code and output of every rank."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs)]


def run(command: Sequence[str | Path], world_size: int = 1) -> str:
    """Run to the end; all ranks must succeed. Returns rank 0's output."""
    results = finish(start(command, world_size))
    for rank, (code, output) in enumerate(results):
        assert code == 0, f"rank {rank} of {world_size} ended with {code}:\n{output}"
    return results[0][1]
