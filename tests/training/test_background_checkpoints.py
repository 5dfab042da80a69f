"""Checkpoints that are written beside the training: what they hold, and what faults leave."""

import errno
import json
import os
import signal
import threading
from pathlib import Path

import pytest
import ranks
import torch
from killed_run import run
from training_toy import PlainEngine, ToyData, ToyTask, log_lines, toy_batch, toy_config

from vlp.training import checkpoints as module
from vlp.training.best_checkpoint import BestCheckpoint
from vlp.training.checkpoints import CheckpointError, Checkpoints, verify
from vlp.training.engines.ddp import DdpEngine
from vlp.training.loop import train
from vlp.training.progress import Progress
from vlp.training.run_folder import RunFolder

SCRIPT = Path(__file__).with_name("killed_run.py")
FILES = ("weights.safetensors", "optimiser.safetensors", "extra.safetensors")


def trained(config, steps=3):
    torch.manual_seed(0)
    task = ToyTask()
    engine = DdpEngine(task, config.training)
    step(engine, task, steps)
    return engine, task


def step(engine, task, steps=1):
    for number in range(steps):
        ids = torch.randint(31, (8, 5), generator=torch.Generator().manual_seed(number))
        engine.backward(engine.forward(toy_batch(ids), number).loss)
        engine.step(1e-2)
        task.after_step(engine.parameters)


@pytest.fixture
def gate(monkeypatch):
    """Nothing is written before it is set."""
    opened, write = threading.Event(), module.write_tensors

    def gated(*arguments):
        assert opened.wait(30)
        write(*arguments)

    monkeypatch.setattr(module, "write_tensors", gated)
    yield opened
    opened.set()


def content(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_changes_right_after_a_save_is_not_in_it(tmp_path, gate):
    config = toy_config()
    engine, task = trained(config)
    progress = Progress(step=3, skipped={"bad": 1})
    background = Checkpoints(tmp_path / "background", config)
    background.save(engine, task, progress, wait=False)
    twin, twin_task = trained(config)  # as it was then
    step(engine, task, 2)
    with torch.no_grad():
        for tensor in (*task.state_dict().values(), *task.average.values()):
            tensor.fill_(7)
        for state in engine._adamw.state.values():
            for tensor in state.values():
                tensor.fill_(7)
    progress.step, progress.skipped["bad"] = 99, 99
    assert not (tmp_path / "background" / "step_3").exists()
    gate.set()
    background.wait()
    Checkpoints(tmp_path / "at_once", config).save(
        twin, twin_task, Progress(step=3, skipped={"bad": 1})
    )
    found, expected = tmp_path / "background" / "step_3", tmp_path / "at_once" / "step_3"
    assert content(found) == content(expected)
    assert (found / "state.json").read_text() == (expected / "state.json").read_text()
    assert verify(found) is None


def test_the_next_save_waits_for_the_one_before(tmp_path, gate):
    config = toy_config()
    engine, task = trained(config)
    checkpoints = Checkpoints(tmp_path, config)
    checkpoints.save(engine, task, Progress(step=1), wait=False)
    before = threading.Timer(0.2, gate.set)
    before.start()
    checkpoints.save(engine, task, Progress(step=2), wait=False)
    assert gate.is_set()
    assert verify(tmp_path / "step_1") is None
    checkpoints.close()
    assert verify(tmp_path / "step_2") is None


def full(path, *rest):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_a_full_disk_is_reported_by_the_next_save_and_by_waiting(tmp_path, monkeypatch):
    config = toy_config()
    engine, task = trained(config)
    checkpoints = Checkpoints(tmp_path, config)
    checkpoints.save(engine, task, Progress(step=1))
    monkeypatch.setattr(module, "write_tensors", full)
    checkpoints.save(engine, task, Progress(step=2), wait=False)
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*step_2: .*No space"):
        checkpoints.save(engine, task, Progress(step=3), wait=False)
    checkpoints.save(engine, task, Progress(step=3), wait=False)
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*step_3: .*No space"):
        checkpoints.wait()
    assert names(tmp_path) == ["step_1"]
    monkeypatch.undo()
    checkpoints.save(engine, task, Progress(step=4))
    assert names(tmp_path) == ["step_1", "step_4"]


@pytest.mark.parametrize("fails_at", [3, 8])
def test_a_run_ends_with_a_fault_of_the_background(tmp_path, monkeypatch, fails_at):
    write = module._write_text

    def fails(path, text):
        (full if path.parent.name == f"step_{fails_at}.tmp" else write)(path, text)

    monkeypatch.setattr(module, "_write_text", fails)
    with pytest.raises(CheckpointError, match=rf"step_{fails_at}: .*No space"):
        run(tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["ended"] == "failed"
    kept = {3: [], 8: ["step_3", "step_6"]}[fails_at]
    assert names(tmp_path / "checkpoints") == kept
    assert not (tmp_path / "model").exists()


def test_a_run_that_fails_still_writes_what_it_has_copied(tmp_path, gate):
    def fail(number):
        if number == 3:
            threading.Timer(0.2, gate.set).start()
            raise KeyError("no such sample")

    torch.manual_seed(0)
    config, task = toy_config(tmp_path), ToyTask()
    with pytest.raises(KeyError):
        train(
            config,
            task,
            ToyData(before=fail),
            PlainEngine(task, config.training),
            RunFolder(tmp_path, False),
        )
    assert verify(tmp_path / "checkpoints" / "step_3") is None


def test_the_best_model_is_written_after_the_checkpoint(tmp_path, gate):
    def validate(_):
        assert not (tmp_path / "checkpoints" / "step_3").exists()  # it is being written meanwhile
        threading.Timer(0.2, gate.set).start()
        return {"accuracy": 0.5}

    torch.manual_seed(0)
    config, task = toy_config(tmp_path, steps=3), ToyTask()
    save_model = task.save_model

    def checked(folder, state):
        assert verify(tmp_path / "checkpoints" / "step_3") is None
        save_model(folder, state)

    task.save_model = checked  # type: ignore[method-assign]
    best = BestCheckpoint(validate, "accuracy", 3)
    engine, place = PlainEngine(task, config.training), RunFolder(tmp_path, False)
    report = train(config, task, ToyData(), engine, place, best=best)
    assert report["best"]["step"] == 3


def test_writing_beside_the_training_changes_nothing_of_it(tmp_path):
    quiet = run(tmp_path / "quiet", checkpoint_every=8, log_every=1)
    busy = run(tmp_path / "busy", checkpoint_every=1, log_every=1, keep_last=8)
    logs = [log_lines(tmp_path / name, times=False) for name in ("quiet", "busy")]
    assert logs[0] == logs[1]
    assert all(torch.equal(v, busy.state_dict()[name]) for name, v in quiet.state_dict().items())
    assert len(names(tmp_path / "busy" / "checkpoints")) == 8
    for file in ("weights.safetensors", "extra.safetensors"):
        place = Path("checkpoints") / "step_8" / file
        one, two = ((tmp_path / each / place).read_bytes() for each in ("quiet", "busy"))
        assert one == two


def ended(folder, step):
    ((code, _),) = ranks.finish(ranks.start([SCRIPT, folder, step], 1))
    return code


def check_kills(tmp_path, number):
    whole = run(tmp_path / "whole")
    assert ended(tmp_path / "counted", "none") == 0
    steps = int((tmp_path / "counted.steps").read_text())
    assert steps > 50
    for place in range(number):
        folder = tmp_path / str(place)
        at = (2 * place + 1) * steps // (2 * number)
        assert ended(folder, str(at)) == -signal.SIGKILL
        there = sorted(folder.glob("checkpoints/step_?"))
        assert all(verify(path) is None for path in there)
        resumed = run(folder, resume=True)
        # One that a kill did not let go stays where nothing more was to be saved.
        left = names(folder / "checkpoints")
        assert left[-2:] == ["step_6", "step_8"]
        assert len(left) == 2 or there == [folder / "checkpoints" / name for name in left]
        state = resumed.state_dict()
        assert all(torch.equal(v, state[name]) for name, v in whole.state_dict().items())


def test_a_run_killed_while_it_writes_goes_on_from_the_checkpoint_before(tmp_path):
    check_kills(tmp_path, 3)


@pytest.mark.nightly
def test_a_run_killed_anywhere_while_it_writes_goes_on(tmp_path):
    check_kills(tmp_path, 16)
