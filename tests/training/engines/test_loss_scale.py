"""Loss scaling against PyTorch's GradScaler, and in the loop."""

import json

import pytest
import torch
from training_toy import ToyData, ToyTask, toy_config

from vlp.distributed import broadcast_tensors
from vlp.training.engines import engine as module
from vlp.training.engines.ddp import DdpEngine
from vlp.training.engines.engine import LOSS_SCALE, LossScale
from vlp.training.loop import train
from vlp.training.run_folder import RunFolder


def test_the_scale_moves_as_that_of_gradscaler(monkeypatch):
    monkeypatch.setattr(module, "INTERVAL", 3)
    reference = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    weight = torch.nn.Parameter(torch.zeros(()))
    optimiser = torch.optim.SGD([weight])
    ours, finite = LossScale("fp16"), torch.rand(60, generator=torch.Generator().manual_seed(0))
    for applied in (finite < 0.8).tolist():
        reference.scale(weight * (1.0 if applied else float("inf"))).backward()
        reference.step(optimiser)
        assert ours.update(applied) == reference.get_scale()
        reference.update()
        optimiser.zero_grad()
        taken = LossScale("fp16")
        taken.load(ours.state()[LOSS_SCALE])
        ours = taken  # at every step: nothing else is remembered
    assert ours.value == reference.get_scale() != 2.0**16


def test_the_scale_does_not_fall_below_one():
    scale = LossScale("fp16")
    for _ in range(30):
        scale.update(False)
    assert scale.value == 1


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_other_precisions_have_no_scale(precision):
    scale = LossScale(precision)
    assert scale.update(False) is None
    assert (scale.value, scale.state()) == (1, {})
    scale.load(torch.tensor([8.0, 1.0]))
    assert scale.value == 1


@pytest.fixture
def start(monkeypatch):
    """A first scale with which no gradient of the toy overflows, however a CPU sums float16."""
    monkeypatch.setattr(module, "FIRST_SCALE", 2.0**10)
    return 2.0**10


def run(folder, resume=False, **settings):
    torch.manual_seed(0)
    config, task = toy_config(folder, **{"precision": "fp16", "log_every": 1} | settings), ToyTask()
    task.precision = config.training.precision
    engine, data = DdpEngine(task, config.training), ToyData(bad=frozenset({1}))
    return train(config, task, data, engine, RunFolder(folder, resume), resume)


def test_a_step_in_float16_that_is_not_finite_is_counted_and_the_run_resumes_exactly(
    tmp_path, capsys, start
):
    report = run(tmp_path / "whole")
    assert (report["ended"], report["non_finite_steps"]) == ("finished", 1)
    assert "step 2 skipped: loss total not finite, the loss scale was 1024" in (
        capsys.readouterr().err
    )
    lines = (tmp_path / "whole" / "log.jsonl").read_text().splitlines()
    scales = [json.loads(line).get("loss_scale") for line in lines]
    assert scales == [start, None, *[start / 2] * 6]
    run(tmp_path / "cut", steps=3)
    assert run(tmp_path / "cut", resume=True)["resumed_at_steps"] == [3]
    for file in ("weights", "optimiser"):
        whole, cut = (
            dict(broadcast_tensors(tmp_path / name / "checkpoints/step_8" / f"{file}.safetensors"))
            for name in ("whole", "cut")
        )
        assert whole.keys() == cut.keys()
        assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert whole[LOSS_SCALE].tolist() == [start / 2, 6]


def test_a_run_goes_on_in_another_precision(tmp_path, start):
    run(tmp_path, steps=3)
    run(tmp_path, resume=True, steps=4, precision="bf16")
    report = run(tmp_path, resume=True, steps=5)
    assert report["resumed_at_steps"] == [3, 4]
    assert report["last_log"]["loss_scale"] == start
