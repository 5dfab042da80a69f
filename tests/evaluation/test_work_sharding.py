import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evaluation.work_sharding import ProcessGroup, evaluation_autocast

ROOT = Path(__file__).resolve().parents[2]


@given(st.integers(0, 50), st.integers(1, 9))
def test_blocks_are_shared_once_and_evenly(count, world_size):
    shares = [ProcessGroup(rank, world_size).share(count) for rank in range(world_size)]
    assert [block for share in shares for block in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def launch(world_size, code):
    """Run `python code...` as torchrun would, each rank a process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(world_size):
        environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment |= {"WORLD_SIZE": str(world_size)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen([sys.executable, *code], cwd=ROOT, env=environment, **pipes))
    done = []
    for process in ranks:
        out, err = process.communicate(timeout=120)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done


FAILING = """
from evaluation.work_sharding import ProcessGroup
from vlp.distributed import process_group
def work(block):
    if block == 3:
        raise ValueError("block 3 is bad")
with process_group():
    ProcessGroup.current().map_blocks(4, work)
"""


@pytest.mark.nightly
def test_a_rank_that_fails_ends_the_others():
    first, second = launch(2, ["-c", FAILING])
    assert first.returncode == second.returncode == 1
    assert "failed on rank 1: ValueError('block 3 is bad')" in first.stderr
    assert "ValueError: block 3 is bad" in second.stderr


THREADS = """
from pathlib import Path
from vlp.distributed import all_gather_object, process_group
def threads():
    return {file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")}
with process_group():
    import torch.distributed.fsdp  # as late as commands import what loads a model
    all_gather_object("value")
    print("pt_gloo_runloop" in threads())
print(any("gloo" in name for name in threads()))
"""


@pytest.mark.nightly
def test_no_thread_of_a_group_outlives_it():
    for process in launch(2, ["-c", THREADS]):
        assert process.stdout.split() == ["True", "False"], process.stderr


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def state(device):
    on = torch.is_autocast_enabled(device.type)
    kind = torch.get_autocast_dtype(device.type) if on else None
    return kind, torch.get_float32_matmul_precision()


@pytest.fixture
def gpu_with_bf16(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda *_: True)
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)


@pytest.mark.parametrize(
    ("device", "precision", "able", "expected"),
    [
        (CPU, None, True, (None, "highest")),
        (CPU, "float32", True, (None, "highest")),
        (GPU, None, True, (torch.bfloat16, "high")),
        (GPU, None, False, (None, "highest")),
        (GPU, "float32", True, (None, "highest")),
        (GPU, "bf16", True, (torch.bfloat16, "highest")),
    ],
)
@pytest.mark.usefixtures("gpu_with_bf16")
def test_only_gpus_with_bf16_compute_in_it_by_default(
    device, precision, able, expected, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda *_: able)
    with evaluation_autocast(device, precision):
        assert state(device) == expected
    assert state(device) == (None, "highest")


@pytest.mark.usefixtures("gpu_with_bf16")
def test_tf32_ends_with_the_last_of_several_threads():
    first, second = evaluation_autocast(GPU, None), evaluation_autocast(GPU, None)
    for context in (first, second):
        context.__enter__()
    first.__exit__(None, None, None)
    assert torch.get_float32_matmul_precision() == "high"
    second.__exit__(None, None, None)
    assert torch.get_float32_matmul_precision() == "highest"
