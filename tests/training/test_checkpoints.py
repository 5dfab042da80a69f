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
import threading
from pathlib import Path

import pytest
import ranks
import torch
from killed_run import run
from killed_steps import in_child, killed_at, steps_of
from training_toy import PlainEngine, ToyData, ToyTask, log_lines, toy_batch, toy_config

from vlp.distributed import broadcast_tensors
from vlp.training import checkpoints as module
from vlp.training.checkpoints import BestCheckpoint, CheckpointError, Checkpoints, verify
from vlp.training.config import PretrainConfig
from vlp.training.engines.ddp import DdpEngine
from vlp.training.progress import Progress

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
    (tmp_path / "step_4.tmp").symlink_to(tmp_path / "step_1")  # a pruned link to another disk
    progress = load(tmp_path)
    assert progress.step == 2
    assert names(tmp_path) == ["step_1", "step_2"]
    shutil.copytree(tmp_path / "step_1", tmp_path / "step_99")  # it would stay the newest one
    with pytest.raises(CheckpointError, match=r"it is of step 1\); move step_99 away"):
        load(tmp_path)


def raising(code):
    def fail(path, *rest):
        raise OSError(code, os.strerror(code), str(path))

    return fail


full = raising(errno.ENOSPC)


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


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("function", ["sha256_of", "os.scandir", "Path.read_bytes"])
def test_an_error_of_the_disk_renames_no_checkpoint(tmp_path, monkeypatch, code, function):
    save(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(f"vlp.training.checkpoints.{function}", raising(code))
        with pytest.raises((CheckpointError, OSError), match=os.strerror(code)):
            load(tmp_path)
    assert names(tmp_path) == ["step_1", "step_2"]
    assert load(tmp_path).step == 2


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


def judged_run(folder, figures, patience=None, resume=False, data="", steps=8, metric="accuracy"):
    """A run of 8 steps that is judged every second step, and finds these figures."""
    found = iter({metric: figure, "other": 0.5} for figure in figures)
    selection = BestCheckpoint(lambda _: next(found), metric, 2, patience, data)
    return run(folder, resume=resume, best=selection, steps=steps)[1]


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


@pytest.mark.parametrize(
    ("metric", "figures"), [("accuracy", [0.4, 0.3, 0.2, 0.9]), ("loss/itm", [0.4, 0.5, 0.6, 0.1])]
)
def test_a_run_ends_when_it_no_longer_gets_better(tmp_path, metric, figures):
    report = judged_run(tmp_path / "run", figures, patience=2, metric=metric)
    assert (report["ended"], report["step"], report["best"]["step"]) == ("finished", 6, 2)
    assert (tmp_path / "run" / "checkpoints" / "step_6").is_dir()
    # Started again it knows that it has seen enough.
    again = judged_run(tmp_path / "run", [], patience=2, resume=True, metric=metric)
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


SCRIPT = Path(__file__).with_name("killed_run.py")
STATE_FILES = ("weights.safetensors", "optimiser.safetensors", "extra.safetensors")


def trained(steps=3):
    torch.manual_seed(0)
    task = ToyTask()
    engine = DdpEngine(task, CONFIG.training)
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
    return {name: (folder / name).read_bytes() for name in STATE_FILES}


def test_what_changes_right_after_a_save_is_not_in_it(tmp_path, gate):
    engine, task = trained()
    progress = Progress(step=3, skipped={"bad": 1})
    background = Checkpoints(tmp_path / "background", CONFIG)
    background.save(engine, task, progress, wait=False)
    twin, twin_task = trained()  # as it was then
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
    progress = Progress(step=3, skipped={"bad": 1})
    Checkpoints(tmp_path / "at_once", CONFIG).save(twin, twin_task, progress)
    found, expected = tmp_path / "background" / "step_3", tmp_path / "at_once" / "step_3"
    assert content(found) == content(expected)
    assert (found / "state.json").read_text() == (expected / "state.json").read_text()
    assert verify(found) is None


def test_the_next_save_waits_for_the_one_before(tmp_path, gate):
    engine, task = trained()
    checkpoints = Checkpoints(tmp_path, CONFIG)
    checkpoints.save(engine, task, Progress(step=1), wait=False)
    before = threading.Timer(0.2, gate.set)
    before.start()
    checkpoints.save(engine, task, Progress(step=2), wait=False)
    assert gate.is_set()
    assert verify(tmp_path / "step_1") is None
    checkpoints.close()
    assert verify(tmp_path / "step_2") is None


def test_the_next_save_and_waiting_report_a_full_disk(tmp_path, monkeypatch):
    engine, task = trained()
    checkpoints = Checkpoints(tmp_path, CONFIG)
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

    with pytest.raises(KeyError):
        run(tmp_path, data=ToyData(before=fail))
    assert verify(tmp_path / "checkpoints" / "step_3") is None


def test_the_best_model_is_written_after_the_checkpoint(tmp_path, gate):
    def validate(_):
        assert not (tmp_path / "checkpoints" / "step_3").exists()  # it is being written meanwhile
        threading.Timer(0.2, gate.set).start()
        return {"accuracy": 0.5}

    task = ToyTask()
    save_model = task.save_model

    def checked(folder, state):
        assert verify(tmp_path / "checkpoints" / "step_3") is None
        save_model(folder, state)

    task.save_model = checked  # type: ignore[method-assign]
    best = BestCheckpoint(validate, "accuracy", 3)
    _, report = run(tmp_path, task=task, best=best, steps=3)
    assert report["best"]["step"] == 3


def test_writing_beside_the_training_changes_nothing_of_it(tmp_path):
    quiet, _ = run(tmp_path / "quiet", checkpoint_every=8, log_every=1)
    busy, _ = run(tmp_path / "busy", checkpoint_every=1, log_every=1, keep_last=8)
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


@pytest.mark.parametrize("number", [3, pytest.param(16, marks=pytest.mark.nightly)])
def test_a_run_killed_while_it_writes_goes_on_from_the_checkpoint_before(tmp_path, number):
    whole, _ = run(tmp_path / "whole")
    assert ended(tmp_path / "counted", "none") == 0
    steps = int((tmp_path / "counted.steps").read_text())
    assert steps > 50
    for place in range(number):
        folder = tmp_path / str(place)
        at = (2 * place + 1) * steps // (2 * number)
        assert ended(folder, str(at)) == -signal.SIGKILL
        there = sorted(folder.glob("checkpoints/step_?"))
        assert all(verify(path) is None for path in there)
        resumed, _ = run(folder, resume=True)
        # One that a kill did not let go stays where nothing more was to be saved.
        left = names(folder / "checkpoints")
        assert left[-2:] == ["step_6", "step_8"]
        assert len(left) == 2 or there == [folder / "checkpoints" / name for name in left]
        state = resumed.state_dict()
        assert all(torch.equal(v, state[name]) for name, v in whole.state_dict().items())
