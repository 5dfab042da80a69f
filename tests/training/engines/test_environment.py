"""A process without a launcher, and without a process group."""

import os

import pytest
import torch

from vlp import distributed
from vlp.training.engines.environment import prepare_environment

NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR", "OMP_NUM_THREADS"),
)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in NAMES:
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(distributed, "threads", threads, raising=False)
    return monkeypatch


def test_a_plain_process_is_rank_0_of_1(clean: pytest.MonkeyPatch) -> None:
    prepare_environment()
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["0", "1", "0"]
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    assert 0 < int(os.environ["MASTER_PORT"]) < 65536
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    assert distributed.threads == [8]  # type: ignore[attr-defined]


def test_a_launcher_is_not_overruled(clean: pytest.MonkeyPatch) -> None:
    given = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_PORT": "7"}
    for name, value in given.items():
        clean.setenv(name, value)
    clean.setenv("LOCAL_SIZE", "2")
    prepare_environment()
    assert {name: os.environ[name] for name in given} == given
    assert "MASTER_ADDR" not in os.environ
    assert distributed.threads == [4]  # type: ignore[attr-defined]


def test_the_user_says_how_many_threads(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("OMP_NUM_THREADS", "3")
    prepare_environment()
    assert distributed.threads == []  # type: ignore[attr-defined]


def test_without_a_process_group_one_process_agrees_with_itself() -> None:
    assert (distributed.rank(), distributed.world_size()) == (0, 1)
    assert distributed.any_rank(True)
    assert not distributed.any_rank(False)
    assert distributed.from_rank_0("value") == "value"
    assert distributed.gather_to_all(5) == [5]
    values = torch.tensor([1.0, 2.0])
    assert distributed.mean_over_ranks(values).tolist() == [1.0, 2.0]
    distributed.end()
