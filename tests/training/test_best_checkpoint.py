"""The best model on validation data: what is kept, when a run ends, and what compares."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from training_toy import PlainEngine, ToyData, ToyTask, toy_config

from vlp.distributed import broadcast_tensors
from vlp.training.best_checkpoint import BestCheckpoint
from vlp.training.loop import train
from vlp.training.run_folder import RunFolder


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def judged_run(
    folder: Path,
    figures: list[float],
    patience: int | None = None,
    resume: bool = False,
    data: str = "",
    steps: int = 8,
) -> dict[str, Any]:
    """A run of 8 steps that is judged every second step, and finds these figures."""
    torch.manual_seed(0)
    config, task = toy_config(folder, steps=steps), ToyTask()
    found = iter(figures)
    selection = BestCheckpoint(
        lambda _: {"accuracy": next(found), "other": 0.5}, "accuracy", 2, patience, data
    )
    engine = PlainEngine(task, config.training)
    return train(config, task, ToyData(), engine, RunFolder(folder, resume), resume, selection)


def test_the_best_model_on_the_validation_data_is_kept(tmp_path: Path) -> None:
    report = judged_run(tmp_path / "run", [0.4, 0.7, math.nan, 0.6])
    assert report["best"] == {"step": 4, "accuracy": 0.7, "other": 0.5}
    best = dict(broadcast_tensors(tmp_path / "run" / "best" / "model.safetensors"))
    last = dict(broadcast_tensors(tmp_path / "run" / "model" / "model.safetensors"))
    assert any(not torch.equal(best[name], last[name]) for name in last)
    looks = [line for line in lines(tmp_path / "run") if "validation/accuracy" in line]
    assert [(line["step"], line["validation/accuracy"]) for line in looks] == [
        (2, 0.4), (4, 0.7), (6, None), (8, 0.6)
    ]  # fmt: skip


def test_a_run_ends_when_it_no_longer_gets_better(tmp_path: Path) -> None:
    report = judged_run(tmp_path / "run", [0.4, 0.3, 0.2, 0.9], patience=2)
    assert (report["ended"], report["step"], report["best"]["step"]) == ("finished", 6, 2)
    assert (tmp_path / "run" / "checkpoints" / "step_6").is_dir()
    # Started again it knows that it has seen enough.
    again = judged_run(tmp_path / "run", [], patience=2, resume=True)
    assert (again["ended"], again["step"]) == ("finished", 6)


def test_results_of_other_validation_data_do_not_compare(tmp_path: Path) -> None:
    easy = judged_run(tmp_path / "run", [1.0, 0.9], patience=1, data="easy", steps=4)
    assert easy["best"]["step"] == 2
    whole = judged_run(tmp_path / "run", [0.3, 0.2], patience=1, resume=True, data="whole")
    assert (whole["best"]["step"], whole["best"]["accuracy"], whole["step"]) == (6, 0.3, 8)


def test_a_judge_that_fails_costs_nothing_of_the_training(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(StopIteration):
        judged_run(folder, [0.4, 0.7])  # nothing to find after step 6
    assert (folder / "checkpoints" / "step_6").is_dir()
    report = judged_run(folder, [0.8, 0.5], resume=True)
    assert (report["ended"], report["resumed_at_steps"]) == ("finished", [6])
    assert report["best"]["step"] == 6
    looks = [line["step"] for line in lines(folder) if "validation/accuracy" in line]
    assert looks == [2, 4, 6, 8]
