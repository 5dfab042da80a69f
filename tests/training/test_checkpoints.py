"""Checkpoints with a one-process engine; ranks and ZeRO stages are in test_engines.py."""

import errno
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from killed_steps import in_child, killed_at, steps_of
from training_toy import PlainEngine, ToyData, ToyTask, log_lines, toy_config

from vlp.distributed import broadcast_tensors
from vlp.training import checkpoints as module
from vlp.training.best_checkpoint import BestCheckpoint
from vlp.training.checkpoints import CheckpointError, Checkpoints, verify
from vlp.training.config import PretrainConfig
from vlp.training.loop import train
from vlp.training.progress import Progress
from vlp.training.run_folder import RunFolder

CONFIG = toy_config()


def fresh(config=CONFIG):
    task = ToyTask()
    return PlainEngine(task, config.training), task


def save(folder, *steps, config=CONFIG):
    """Checkpoints of a task whose weights are set to the step; returns them by step."""
    engine, task = fresh(config)
    checkpoints = Checkpoints(folder, config)
    saved = {}
    for step in steps:
        with torch.no_grad():
            for number, parameter in enumerate(task.parameters()):
                parameter.fill_(step + number / 100)
        task.average = {"a": torch.full((3,), float(step))}
        checkpoints.save(engine, task, Progress(step=step, samples=8 * step, skipped={"bad": step}))
        saved[step] = {name: value.clone() for name, value in task.state_dict().items()}
    return saved


def load(folder, config=CONFIG, data=None):
    return Checkpoints(folder, config, data).load(*fresh(config))


def test_changed_data_is_named(tmp_path):
    engine, task = fresh()
    before = {"source 0": "a", "source 1": "b", "vocabulary": "c"}
    Checkpoints(tmp_path, CONFIG, before).save(engine, task, Progress(step=1))
    assert load(tmp_path, data=before) == Progress(step=1)
    now = {"source 0": "a", "source 1": "x", "features": "d"}
    with pytest.raises(CheckpointError, match="other data: features, source 1, vocabulary changed"):
        load(tmp_path, data=now)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_save_then_load_gives_everything_back(tmp_path):
    saved = save(tmp_path, 3)[3]
    engine, task = fresh()
    progress = Checkpoints(tmp_path, CONFIG).load(engine, task)
    assert progress == Progress(step=3, samples=24, skipped={"bad": 3})
    assert all(torch.equal(saved[name], value) for name, value in task.state_dict().items())
    assert task.average is not None
    assert torch.equal(task.average["a"], torch.full((3,), 3.0))


def test_the_last_k_stay_and_the_newest_is_loaded(tmp_path):
    config = toy_config(keep_last=2)
    save(tmp_path, 8, 9, 10, 11, 12, config=config)
    assert names(tmp_path) == ["step_11", "step_12"]
    progress = load(tmp_path, config)
    assert progress.step == 12


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path):
    assert load(tmp_path) is None
    assert load(tmp_path / "absent") is None


def test_a_folder_left_half_written_by_a_kill_is_passed_over(tmp_path):
    save(tmp_path, 1, 2)
    shutil.copytree(tmp_path / "step_2", tmp_path / "step_3.tmp")
    (tmp_path / "step_3.tmp" / "state.json").write_text("{")
    progress = load(tmp_path)
    assert progress.step == 2
    assert names(tmp_path) == ["step_1", "step_2"]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize(
    "file", ["weights.safetensors", "extra.safetensors", "state.json", "SHA256SUMS"]
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, caplog, file, damage):
    save(tmp_path, 1, 2)
    assert verify(tmp_path / "step_2") is None
    damage(tmp_path / "step_2" / file)
    with caplog.at_level(logging.WARNING):
        progress = load(tmp_path)
    assert progress.step == 1
    assert "step_2 is damaged" in caplog.text
    assert names(tmp_path) == ["step_1", "step_2.corrupt"]


def test_when_all_are_damaged_nothing_is_guessed(tmp_path):
    save(tmp_path, 1, 2)
    flip(tmp_path / "step_1" / "weights.safetensors")
    flip(tmp_path / "step_2" / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        load(tmp_path)


def test_a_checkpoint_of_another_configuration_names_the_keys(tmp_path):
    save(tmp_path, 1)
    values = toy_config().model_dump()
    values["model"]["text"]["layers"] = 2
    values["objectives"]["mim"] = None
    other = PretrainConfig.model_validate(values)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, other)
    message = str(caught.value)
    assert "another configuration" in message
    assert "model.text.layers: saved 6, now 2" in message
    assert "objectives.mim.output" in message
    assert names(tmp_path) == ["step_1"]


def test_a_changed_schedule_resumes_with_a_warning(tmp_path, caplog):
    save(tmp_path, 1)
    longer = toy_config(steps=99)
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, longer) is not None
    assert "training.steps: saved 8, now 99" in caplog.text


def test_weights_of_another_model_are_an_error(tmp_path):
    save(tmp_path, 1)
    wide = ToyTask(width=32)
    with pytest.raises(CheckpointError, match="step_1 does not fit this model"):
        Checkpoints(tmp_path, CONFIG).load(PlainEngine(wide, CONFIG.training), wide)


def test_an_unknown_format_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "VERSION", 99)
    save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format version 99; this code reads 1"):
        load(tmp_path)


def test_a_step_reached_again_replaces_what_was_there(tmp_path):
    save(tmp_path, 2)
    (tmp_path / "step_2" / "stray").write_text("old")
    save(tmp_path, 2)
    assert not (tmp_path / "step_2" / "stray").exists()
    assert verify(tmp_path / "step_2") is None


@pytest.mark.nightly
def test_killed_at_any_step_of_replacing_the_only_checkpoint(tmp_path):
    """The same step is saved again after a validation; one of the two is always there."""
    config = toy_config(keep_last=1)
    save(tmp_path / "start", 2, config=config)
    shutil.copytree(tmp_path / "start", tmp_path / "counted")

    def again(folder):
        save(folder, 2, config=config)

    steps = range(steps_of(again, tmp_path / "counted"))
    assert len(steps) > 20
    for step in steps:
        folder = tmp_path / str(step)
        shutil.copytree(tmp_path / "start", folder)
        assert in_child(killed_at, step, again, folder) == -signal.SIGKILL
        progress = load(folder, config)
        assert progress.step == 2
        assert names(folder) == ["step_2"]
        shutil.rmtree(folder)


@pytest.mark.parametrize("write", ["write_tensors", "_write_text", "sync_path"])
def test_a_full_disk_leaves_earlier_checkpoints_and_no_half_folder(tmp_path, monkeypatch, write):
    config = toy_config(keep_last=1)
    save(tmp_path, 1, config=config)

    def full(path, *rest):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(module, write, full)
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*step_2: .*No space"):
        save(tmp_path, 2, config=config)
    monkeypatch.undo()
    assert names(tmp_path) == ["step_1"]
    progress = load(tmp_path, config)
    assert progress.step == 1


@pytest.mark.parametrize("limit", [0, 100, 4096])
def test_a_write_that_the_system_refuses_is_the_same_clear_error(tmp_path, limit):
    """No patched function here: the system itself cuts files off at `limit` bytes."""
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*step_2: .*File too large"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step_1"]
    assert verify(tmp_path / "step_1") is None


def test_the_sums_are_those_of_sha256sum(tmp_path):
    save(tmp_path, 1)
    folder = tmp_path / "step_1"
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    for line in lines:
        digest, name = line.split("  ")
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert {line.split("  ")[1] for line in lines} == {*names(folder)} - {"SHA256SUMS"}
    state = json.loads((folder / "state.json").read_text())
    assert state["versions"]["torch"] == importlib.metadata.version("torch")
    assert state["world_size"] == 1


def judged_run(folder, figures, patience=None, resume=False, data="", steps=8):
    """A run of 8 steps that is judged every second step, and finds these figures."""
    torch.manual_seed(0)
    config, task = toy_config(folder, steps=steps), ToyTask()
    found = iter(figures)
    selection = BestCheckpoint(
        lambda _: {"accuracy": next(found), "other": 0.5}, "accuracy", 2, patience, data
    )
    engine = PlainEngine(task, config.training)
    return train(config, task, ToyData(), engine, RunFolder(folder, resume), resume, selection)


def test_the_best_model_on_the_validation_data_is_kept(tmp_path):
    report = judged_run(tmp_path / "run", [0.4, 0.7, math.nan, 0.6])
    assert report["best"] == {"step": 4, "accuracy": 0.7, "other": 0.5}
    best = dict(broadcast_tensors(tmp_path / "run" / "best" / "model.safetensors"))
    last = dict(broadcast_tensors(tmp_path / "run" / "model" / "model.safetensors"))
    assert any(not torch.equal(best[name], last[name]) for name in last)
    looks = [line for line in log_lines(tmp_path / "run") if "validation/accuracy" in line]
    assert [(line["step"], line["validation/accuracy"]) for line in looks] == [
        (2, 0.4), (4, 0.7), (6, None), (8, 0.6)
    ]  # fmt: skip


def test_a_run_ends_when_it_no_longer_gets_better(tmp_path):
    report = judged_run(tmp_path / "run", [0.4, 0.3, 0.2, 0.9], patience=2)
    assert (report["ended"], report["step"], report["best"]["step"]) == ("finished", 6, 2)
    assert (tmp_path / "run" / "checkpoints" / "step_6").is_dir()
    # Started again it knows that it has seen enough.
    again = judged_run(tmp_path / "run", [], patience=2, resume=True)
    assert (again["ended"], again["step"]) == ("finished", 6)


def test_results_of_other_validation_data_do_not_compare(tmp_path):
    easy = judged_run(tmp_path / "run", [1.0, 0.9], patience=1, data="easy", steps=4)
    assert easy["best"]["step"] == 2
    whole = judged_run(tmp_path / "run", [0.3, 0.2], patience=1, resume=True, data="whole")
    assert (whole["best"]["step"], whole["best"]["accuracy"], whole["step"]) == (6, 0.3, 8)


def test_a_judge_that_fails_costs_nothing_of_the_training(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(StopIteration):
        judged_run(folder, [0.4, 0.7])  # nothing to find after step 6
    assert (folder / "checkpoints" / "step_6").is_dir()
    report = judged_run(folder, [0.8, 0.5], resume=True)
    assert (report["ended"], report["resumed_at_steps"]) == ("finished", [6])
    assert report["best"]["step"] == 6
    looks = [line["step"] for line in log_lines(folder) if "validation/accuracy" in line]
    assert looks == [2, 4, 6, 8]
