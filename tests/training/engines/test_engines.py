import json
from pathlib import Path

import pytest
import ranks
import torch
import training_toy
from training_toy import ToyData, ToyTask, toy_config

from vlp.config import ConfigError
from vlp.distributed import broadcast_tensors
from vlp.training.config import TrainingConfig
from vlp.training.engines import ddp
from vlp.training.engines import engine as module
from vlp.training.engines.ddp import DdpEngine
from vlp.training.engines.deepspeed import deepspeed_config
from vlp.training.engines.engine import LOSS_SCALE, LossScale
from vlp.training.optimiser import OptimiserConfig, build_adamw

SCRIPT = Path(__file__).with_name("engine_ranks.py")


@pytest.mark.nightly
def test_every_engine_trains_skips_saves_and_loads_as_plain_pytorch(tmp_path):
    """Also: what 1 rank saved loads on 2 ranks in every engine, and the other way round."""
    for world_size, what in ((1, "train"), (2, "train"), (2, "load"), (1, "load")):
        output = ranks.run([SCRIPT, tmp_path, what], world_size)
        for kind in ("0", "1", "2", "3", "3-whole", "ddp"):
            assert f"{kind} holds on {world_size} ranks" in output


@pytest.mark.nightly
def test_engines_and_recomputation_change_no_loss_and_no_weight(tmp_path):
    ranks.run([SCRIPT.with_name("pretraining_ranks.py"), tmp_path], 2)


def write(folder, values):
    path = folder / "zero.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return TrainingConfig(batch=12, gradient_accumulation_steps=2, engine=str(path))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_shipped_files_take_batch_and_clipping_from_the_yaml(stage):
    config = TrainingConfig(
        batch=12,
        gradient_accumulation_steps=2,
        engine=f"zero{stage}",
        optimiser=OptimiserConfig(clip=0.5),
    )
    merged = deepspeed_config(config, world_size=3)
    assert merged["zero_optimization"]["stage"] == stage
    assert merged["train_micro_batch_size_per_gpu"] == 4
    assert merged["gradient_accumulation_steps"] == 2
    assert merged["train_batch_size"] == 24
    assert merged["gradient_clipping"] == (0.5 if stage else 0.0)
    assert not {"fp16", "bf16", "optimizer", "scheduler"} & merged.keys()


def test_no_clipping_is_zero_for_deepspeed():
    config = TrainingConfig(batch=4, optimiser=OptimiserConfig(clip=None))
    assert deepspeed_config(config, 1)["gradient_clipping"] == 0.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"zero_optimization": {"stage": 1}, "monitor": {}}, "'monitor' is not about ZeRO"),
        ({"zero_optimization": {"stage": 1}, "bf16": {}}, "'bf16' is not .* keys of `training`"),
        ({"zero_optimization": {"stage": 4}}, "stage must be 0, 1, 2 or 3"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer is not supported",
        ),
        ("{", "not valid JSON"),
    ],
)
def test_other_bad_files_are_refused(tmp_path, values, message):
    with pytest.raises(ConfigError, match=message):
        deepspeed_config(write(tmp_path, values), 1)


def test_ranks_must_divide_the_batch(tmp_path):
    config = write(tmp_path, {"zero_optimization": {"stage": 1}})
    with pytest.raises(ConfigError, match=r"training\.batch 12 .* 5 ranks"):
        deepspeed_config(config, 5)


def test_the_scale_moves_as_that_of_gradscaler(monkeypatch):
    monkeypatch.setattr(module, "GROWTH_INTERVAL", 3)
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
    monkeypatch.setattr(module, "INITIAL_SCALE", 2.0**10)
    return 2.0**10


def run(folder, **settings):
    settings = {"precision": "fp16", "log_every": 1} | settings
    return training_toy.run(folder, ToyData(bad=frozenset({1})), engine=DdpEngine, **settings)[1]


def test_a_step_in_float16_that_is_not_finite_is_counted_and_the_run_resumes_exactly(
    tmp_path, capsys, start
):
    report = run(tmp_path / "whole")
    assert (report["ended"], report["non_finite_steps"]) == ("finished", 1)
    printed = capsys.readouterr().err
    assert "step 2 skipped: the loss is not finite (total), the loss scale was 1024" in printed
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


@pytest.fixture
def engines(monkeypatch):
    """The engine as it is on a CPU, and one with fused AdamW, as on a GPU."""
    built = []
    for fused in (False, True):

        def build(module, config, fused=fused):
            adamw = build_adamw(module, config)
            adamw.defaults["fused"] = fused
            for group in adamw.param_groups:
                group["fused"] = fused
            return adamw

        monkeypatch.setattr(ddp, "build_adamw", build)
        torch.manual_seed(0)
        built.append(DdpEngine(ToyTask(), toy_config().training))
    return built


def states(engine):
    names = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    return names | {name: value.clone() for name, value in engine._moments().items()}


def step(engine, batch, factor=1.0):
    engine.backward(factor * engine.forward(batch, 0).loss)
    return engine.step(1e-2)


def test_it_clips_and_moves_as_a_step_that_is_read(engines):
    batches = [batch for batch, _ in zip(ToyData().batches(), range(5))]
    for batch, _ in batches:
        read, unread = (step(engine, batch) for engine in engines)
        assert read.applied is True
        assert isinstance(unread.applied, torch.Tensor)
        assert unread.applied
        assert read.gradient_norm > 0.5  # it is clipped
        assert float(unread.gradient_norm) == pytest.approx(read.gradient_norm, rel=1e-5)
    for name, value in states(engines[0]).items():
        torch.testing.assert_close(states(engines[1])[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_no_bit(engines, factor):
    unread = engines[1]
    batch, _ = next(ToyData().batches())
    step(unread, batch)
    before = states(unread)
    assert not step(unread, batch, factor).applied
    for name, value in states(unread).items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in unread.module.parameters())
    assert step(unread, batch).applied
    assert not torch.equal(states(unread)["out.weight"], before["out.weight"])
