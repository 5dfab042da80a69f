import os

import pytest
import torch

from vlp import distributed
from vlp.config import ConfigError
from vlp.training.config import TrainingConfig
from vlp.training.engines.environment import (
    check_accelerate_flags,
    is_emulated,
    prepare_environment,
)

NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR", "OMP_NUM_THREADS"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    *("SLURM_STEP_NUM_NODES", "SLURM_JOB_ID"),
)


@pytest.fixture
def clean(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(distributed, "threads", threads, raising=False)
    return monkeypatch


def test_a_plain_process_is_rank_0_of_1(clean):
    prepare_environment()
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["0", "1", "0"]
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    assert 0 < int(os.environ["MASTER_PORT"]) < 65536
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    assert distributed.threads == [8]  # type: ignore[attr-defined]


def test_a_launcher_is_not_overruled(clean):
    given = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_PORT": "7"}
    for name, value in given.items():
        clean.setenv(name, value)
    clean.setenv("LOCAL_SIZE", "2")
    prepare_environment()
    assert {name: os.environ[name] for name in given} == given
    assert "MASTER_ADDR" not in os.environ
    assert distributed.threads == [4]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("nodes", "address"), [("1", "127.0.0.1"), ("2", None)])
def test_tasks_of_srun_are_ranks(clean, nodes, address):
    clean.setenv("SLURM_STEP_NUM_TASKS", "6")
    clean.setenv("SLURM_PROCID", "5")
    clean.setenv("SLURM_LOCALID", "1")
    clean.setenv("SLURM_STEP_TASKS_PER_NODE", "4(x1),2")
    clean.setenv("SLURM_STEP_NUM_NODES", nodes)
    clean.setenv("SLURM_JOB_ID", "40007")
    prepare_environment()
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["5", "6", "1"]
    assert os.environ.get("MASTER_ADDR") == address
    assert os.environ["MASTER_PORT"] == "20007"
    assert distributed.threads == [2]  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["WORLD_SIZE=2", "RANK=1", "WORLD_SIZE=two", "SLURM_PROCID=1"])
def test_half_of_a_ranks_variables_is_refused(clean, text):
    clean.setenv(*text.split("="))
    clean.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(ConfigError, match=f"has (LOCAL_RANK=0 )?{text}( .*)?: not the numbers of"):
        prepare_environment()


def test_one_task_of_slurm_may_start_a_launcher(clean):
    clean.setenv("SLURM_PROCID", "0")
    prepare_environment()
    assert os.environ["WORLD_SIZE"] == "1"


def test_only_a_cpu_emulates_and_only_half_precision(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert is_emulated(torch.device("cpu"), "bf16")
    assert not is_emulated(torch.device("cpu"), "float32")
    assert not is_emulated(torch.device("cuda"), "bf16")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert not is_emulated(torch.device("cpu"), "bf16")


@pytest.mark.parametrize(
    ("variable", "value", "agrees"),
    [
        ("MIXED_PRECISION", "fp16", {"precision": "fp16"}),
        ("GRADIENT_ACCUMULATION_STEPS", "4", {"gradient_accumulation_steps": 4}),
        ("DYNAMO_BACKEND", "INDUCTOR", {"compile": "blocks"}),
        ("USE_DEEPSPEED", "true", {"engine": "deepspeed"}),
        ("USE_FSDP", "true", None),
    ],
)
def test_flags_of_accelerate_agree_with_the_configuration(variable, value, agrees, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_{variable}", value)
    training = TrainingConfig(trackers=(), engine="ddp", compile="auto")  # none on a CPU
    with pytest.raises(ConfigError, match="is ignored; set training"):
        check_accelerate_flags(training)
    if agrees:
        check_accelerate_flags(training.model_copy(update=agrees))
