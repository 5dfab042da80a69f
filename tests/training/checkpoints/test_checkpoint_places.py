"""Checkpoints behind a URL: complete by their SHA256SUMS, and otherwise as on a disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from training_toy import PlainEngine, ToyData, ToyTask, toy_config

from vlp.config import ConfigError
from vlp.data.shards import outages
from vlp.training.checkpoints import places
from vlp.training.checkpoints.checkpoint import CheckpointError, Checkpoints
from vlp.training.config import PretrainConfig
from vlp.training.engines.ddp import DdpEngine
from vlp.training.logging.progress import Progress
from vlp.training.loop import train
from vlp.training.run_folder import RunFolder

STORE = fsspec.filesystem("memory")
URL = "memory://bucket/run"


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    STORE.store.clear()
    STORE.pseudo_dirs[:] = [""]
    yield
    STORE.store.clear()


def configured(**training: Any) -> PretrainConfig:
    return toy_config(**{"engine": "ddp", "checkpoint_folder": URL, **training})


def saved(scratch: Path, steps: range, config: PretrainConfig) -> ToyTask:
    task = ToyTask()
    engine = DdpEngine(task, config.training)
    checkpoints = Checkpoints(scratch, config)
    for step in steps:
        with torch.no_grad():
            for parameter in task.parameters():
                parameter.fill_(step)
        checkpoints.save(engine, task, Progress(step=step))
    return task


def loaded(scratch: Path, config: PretrainConfig) -> tuple[Progress | None, ToyTask]:
    task = ToyTask()
    engine = DdpEngine(task, config.training)
    return Checkpoints(scratch, config).load(engine, task), task


def names() -> list[str]:
    return sorted({path.split("/")[3] for path in STORE.find("/bucket/run")})


def equal(one: ToyTask, two: ToyTask) -> bool:
    state = two.state_dict()
    return all(torch.equal(value, state[name]) for name, value in one.state_dict().items())


forms = pytest.mark.parametrize("form", ["full", "sharded"])


@forms
def test_saved_pruned_and_loaded_as_on_a_disk(tmp_path: Path, form: str) -> None:
    config = configured(checkpoint_format=form, keep_last=2, keep_every=3)
    task = saved(tmp_path, range(1, 7), config)
    assert names() == ["step_3", "step_5", "step_6"]
    assert not list(tmp_path.iterdir())
    progress, again = loaded(tmp_path, config)
    assert progress == Progress(step=6)
    assert equal(task, again)
    assert not list(tmp_path.iterdir())


@forms
def test_what_has_no_sums_is_incomplete_and_goes(tmp_path: Path, form: str) -> None:
    config = configured(checkpoint_format=form)
    saved(tmp_path, range(1, 3), config)
    STORE.rm("/bucket/run/step_2/SHA256SUMS")
    assert loaded(tmp_path, config)[0] == Progress(step=1)
    assert names() == ["step_1"]


@forms
def test_a_damaged_one_is_moved_aside(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(checkpoint_format=form)
    saved(tmp_path, range(1, 3), config)
    STORE.pipe("/bucket/run/step_2/state.json", b"{}")
    with caplog.at_level(logging.WARNING):
        assert loaded(tmp_path, config)[0] == Progress(step=1)
    assert f"{URL}/step_2 is damaged (state.json does not have its checksum)" in caplog.text
    assert names() == ["step_1", "step_2.corrupt"]


@forms
def test_the_same_step_again_stays_until_the_second_is_complete(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(checkpoint_format=form, keep_last=1)
    task = ToyTask()
    engine = DdpEngine(task, config.training)
    checkpoints = Checkpoints(tmp_path, config)
    checkpoints.save(engine, task, Progress(step=2, looked=0))
    put = type(STORE).put_file

    def fails(self: Any, source: str, target: str, **options: Any) -> None:
        if target.endswith("SHA256SUMS"):
            raise PermissionError("no more room in this bucket")
        put(self, source, target, **options)

    monkeypatch.setattr(type(STORE), "put_file", fails)
    with pytest.raises(CheckpointError, match=r"run/step_2\.2: .*no more room in this bucket"):
        checkpoints.save(engine, task, Progress(step=2, looked=2))
    assert loaded(tmp_path, config)[0] == Progress(step=2, looked=0)
    monkeypatch.undo()
    checkpoints.save(engine, task, Progress(step=2, looked=2))
    assert names() == ["step_2.2"]
    checkpoints.save(engine, task, Progress(step=2, looked=3))
    assert loaded(tmp_path, config)[0] == Progress(step=2, looked=3)
    checkpoints.save(engine, task, Progress(step=3))
    assert names() == ["step_3"]


def test_a_store_that_fails_damages_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured()
    saved(tmp_path, range(1, 3), config)

    def refuses(*_: Any, **options: Any) -> None:
        raise ConnectionError("connection reset")

    monkeypatch.setattr(type(STORE), "cat_file", refuses)
    monkeypatch.setattr(places, "DEFAULT_OUTAGES", outages.OutageConfig(seconds=0))
    with pytest.raises(CheckpointError, match="connection reset; tried 1 times"):
        loaded(tmp_path, config)
    monkeypatch.undo()
    assert names() == ["step_1", "step_2"]
    assert loaded(tmp_path, config)[0] == Progress(step=2)


def test_a_run_keeps_its_checkpoints_there_and_goes_on_from_them(tmp_path: Path) -> None:
    def run(folder: Path, resume: bool, **training: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        config, task = toy_config(folder, checkpoint_folder=URL, **training), ToyTask()
        engine, place = PlainEngine(task, config.training), RunFolder(folder, resume)
        return train(config, task, ToyData(), engine, place, resume)

    run(tmp_path / "run", False, steps=4)
    assert names() == ["step_3", "step_4"]
    with pytest.raises(CheckpointError, match=r"memory://bucket/run/ holds checkpoints; continue"):
        run(tmp_path / "other", False)
    with pytest.raises(CheckpointError, match=r"(?s)of the run .*/run, and .*/other differs.*clip"):
        run(tmp_path / "other", True, optimiser={"learning_rate": 1e-2, "clip": 1.0})
    report = run(tmp_path / "other", True, max_non_finite=3)  # of the run, on another machine
    assert report["resumed_at_steps"] == [4]
    assert names() == ["step_6", "step_8"]


def test_a_url_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    for url, reason in (
        ("https://example.org/run", "nothing can be written to a web server"),
        ("nowhere://bucket", "the protocol 'nowhere' is not known"),
    ):
        with pytest.raises(ConfigError, match=reason):
            Checkpoints(tmp_path, configured(checkpoint_folder=url))


def test_a_file_url_is_a_folder(tmp_path: Path) -> None:
    config = configured(checkpoint_folder=f"file://{tmp_path}/there")
    saved(tmp_path / "scratch", range(1, 2), config)
    assert (tmp_path / "there" / "step_1" / "state.json").is_file()
