"""Sharded checkpoints: the same state as full ones, on any number of ranks, and nothing run."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from pydantic import ValidationError
from training_toy import PlainEngine, ToyTask, toy_config

from launch.__main__ import main
from vlp.training.checkpoints.checkpoint import CheckpointError, Checkpoints, verify
from vlp.training.engines.ddp import DdpEngine
from vlp.training.logging.progress import Progress

SCRIPT = Path(__file__).with_name("sharded_ranks.py")
SHARDED = toy_config(checkpoint_format="sharded", engine="ddp")
FULL = toy_config(engine="ddp")


def engine_of(seed: int = 0, width: int = 24) -> tuple[DdpEngine, ToyTask]:
    torch.manual_seed(seed)
    task = ToyTask(width)
    engine = DdpEngine(task, SHARDED.training)
    for tensors in engine.held().values():
        for tensor in tensors.values():
            tensor.normal_()
    task.average = {"a": torch.randn(3)}
    return engine, task


def state(engine: DdpEngine, task: ToyTask) -> dict[str, torch.Tensor]:
    found = {f"{file}/{n}": t for file, ts in engine.snapshot().items() for n, t in ts.items()}
    return found | task.extra_state()


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(t, two[name]) for name, t in one.items())


def test_a_run_goes_on_from_one_form_in_the_other(tmp_path: Path) -> None:
    engine, task = engine_of()
    Checkpoints(tmp_path, FULL).save(engine, task, Progress(step=1))
    sharded_engine, sharded_task = engine_of(1)
    checkpoints = Checkpoints(tmp_path, SHARDED)
    assert checkpoints.load(sharded_engine, sharded_task) == Progress(step=1)
    assert same(state(engine, task), state(sharded_engine, sharded_task))
    checkpoints.save(sharded_engine, sharded_task, Progress(step=2))
    assert {path.name for path in (tmp_path / "step_2").iterdir()} == {
        *(".metadata", "__0_0.distcp", "state.json", "SHA256SUMS")
    }
    assert verify(tmp_path / "step_2") is None
    full_engine, full_task = engine_of(2)
    assert Checkpoints(tmp_path, FULL).load(full_engine, full_task) == Progress(step=2)
    assert same(state(engine, task), state(full_engine, full_task))


def test_converted_to_the_full_form_it_has_the_bytes_of_a_full_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, task = engine_of()
    Checkpoints(tmp_path / "full", FULL).save(engine, task, Progress(step=1))
    Checkpoints(tmp_path / "sharded", SHARDED).save(engine, task, Progress(step=1))
    old, new = tmp_path / "sharded" / "step_1", tmp_path / "converted" / "step_1"
    assert main(["convert-checkpoint", str(old), str(new)]) == 0
    assert verify(new) is None
    for path in sorted((tmp_path / "full" / "step_1").glob("*.safetensors")):
        assert (new / path.name).read_bytes() == path.read_bytes()
    again = engine_of(1)
    assert Checkpoints(tmp_path / "converted", FULL).load(*again) == Progress(step=1)
    assert same(state(*again), state(engine, task))
    assert main(["convert-checkpoint", str(old), str(new)]) == 2
    assert main(["convert-checkpoint", str(new), str(tmp_path / "twice")]) == 2
    (old / "__0_0.distcp").write_bytes(b"")
    assert main(["convert-checkpoint", str(old), str(tmp_path / "damaged")]) == 2
    said = capsys.readouterr().err
    assert "exists; name a new folder" in said
    assert "is in the full form already" in said
    assert "__0_0.distcp does not have its checksum" in said
    assert not (tmp_path / "damaged").exists()


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "state.json", "SHA256SUMS"])
def test_a_damaged_one_gives_way_to_the_one_before(
    tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine, task = engine_of()
    checkpoints = Checkpoints(tmp_path, SHARDED)
    for step in (1, 2):
        checkpoints.save(engine, task, Progress(step=step))
    os.truncate(tmp_path / "step_2" / file, 10)
    assert Checkpoints(tmp_path, SHARDED).load(*engine_of(1)) == Progress(step=1)
    assert "step_2 is damaged" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2.corrupt"]


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("content", [pickle.dumps(Runs()), pickle.dumps({}), b"", b"\x80\x04."])
def test_metadata_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    Checkpoints(tmp_path, SHARDED).save(*engine_of(), Progress(step=1))
    folder = tmp_path / "step_1"
    (folder / ".metadata").write_bytes(content)
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in folder.iterdir()
        if path.name != "SHA256SUMS"
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))
    with pytest.raises(CheckpointError, match=r"\.metadata: not that of a checkpoint"):
        Checkpoints(tmp_path, SHARDED).load(*engine_of())
    assert not (tmp_path / "ran").exists()


def test_another_model_is_an_error(tmp_path: Path) -> None:
    Checkpoints(tmp_path, SHARDED).save(*engine_of(), Progress(step=1))
    with pytest.raises(CheckpointError, match=r"step_1 does not fit this model: .*ize"):
        Checkpoints(tmp_path, SHARDED).load(*engine_of(width=32))
    engine, task = engine_of()
    task.more = torch.nn.Parameter(torch.zeros(2))
    engine._named["more"] = task.more
    engine._adamw.state[task.more] = dict(next(iter(engine._adamw.state.values())))
    with pytest.raises(CheckpointError, match=r"does not fit this model: .*lacks .*more"):
        Checkpoints(tmp_path, SHARDED).load(engine, task)
    Checkpoints(tmp_path, SHARDED).save(engine, task, Progress(step=2))
    with pytest.raises(CheckpointError, match=r"does not fit this model: .*has no .*more"):
        Checkpoints(tmp_path, SHARDED).load(*engine_of())


def test_the_loss_scale_is_part_of_it(tmp_path: Path) -> None:
    half = toy_config(checkpoint_format="sharded", engine="ddp", precision="fp16")
    task = ToyTask()
    engine = DdpEngine(task, half.training)
    engine._scale.value = 512.0
    Checkpoints(tmp_path, half).save(engine, task, Progress(step=1))
    again = ToyTask()
    other = DdpEngine(again, half.training)
    assert Checkpoints(tmp_path, half).load(other, again) == Progress(step=1)
    assert other._scale.value == 512.0


def test_deepspeed_refuses_shards_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="deepspeed writes full checkpoints alone"):
        toy_config(checkpoint_format="sharded", engine="deepspeed")
    Checkpoints(tmp_path, SHARDED).save(*engine_of(), Progress(step=1))
    task = ToyTask()
    engine = PlainEngine(task, FULL.training)  # like DeepSpeed's it knows full files alone
    with pytest.raises(CheckpointError, match=r"vlp convert-checkpoint .*step_1 NEW"):
        Checkpoints(tmp_path, FULL).load(engine, task)
    assert (tmp_path / "step_1").is_dir()


@pytest.mark.integration
@pytest.mark.distributed
def test_ranks_write_and_read_shards_of_both_engines(tmp_path: Path) -> None:
    """What 2 ranks saved, on a disk and in a store, is loaded on 2, 1 and 3, beside full ones."""
    assert "save holds on 2 ranks" in ranks.run([SCRIPT, tmp_path, "save"], 2)
    for folder in tmp_path.glob("*_*/step_6*"):
        shutil.rmtree(folder)
    for number in (1, 2, 3):
        ranks.run([SCRIPT, tmp_path, "load"], number)


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["full_disk", "lonely", "moved"])
def test_faults_of_one_rank_are_sentences_of_all(tmp_path: Path, what: str) -> None:
    ranks.run([SCRIPT, tmp_path, what], 2)


@pytest.mark.distributed
def test_a_rank_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    (code, said), (other, _) = ranks.finish(ranks.start([SCRIPT, tmp_path, "killed"], 2))
    assert (code, other) == (0, -signal.SIGKILL)
    assert "lost the other rank" in said
    ranks.run([SCRIPT, tmp_path, "goes_on"], 1)
