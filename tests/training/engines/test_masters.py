"""Weights in bf16 with float32 masters: equal forward passes, exact resumes, plain checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compile_toy import ROWS, configuration
from safetensors.torch import load_file
from torch import Tensor, nn

from evaluation.benchmarks.pretrain_step import random_batch
from vlp.tasks.pretraining import Pretraining
from vlp.training.config import LoopConfig, PretrainConfig, PretrainTrainingConfig
from vlp.training.engines.base import WEIGHTS, write_snapshot
from vlp.training.engines.ddp import DdpEngine
from vlp.training.engines.masters import Masters


def engine_of(weights: str) -> DdpEngine:
    values = configuration().model_dump()
    values["objectives"]["teacher"] = {"queue": 16, "warmup_steps": 10}
    values["training"] |= {"weights": weights, "precision": "bf16", "engine": "ddp"}
    config = PretrainConfig.model_validate(values)
    torch.manual_seed(0)
    task = Pretraining(config.model, config.objectives, "", "bf16", log_every=10**6)
    return DdpEngine(task, config.training)


def train(engine: DdpEngine, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        batch: Any = random_batch(configuration().inputs, ROWS, 5, seed=step)
        output = engine.forward(batch, step)
        engine.backward(output.loss)
        update = engine.step(1e-3)
        engine.module.after_step(engine.parameters, torch.tensor(update.applied))
        losses.append(float(output.loss.detach()))
    return losses


def test_the_first_loss_is_that_of_float32_weights_and_later_ones_are_near():
    kept, masters = (train(engine_of(weights), 0, 20) for weights in ("float32", "bf16"))
    assert kept[0] == masters[0]
    assert masters == pytest.approx(kept, rel=0.01)


def test_a_teacher_that_keeps_rounded_weights_changes_no_bit():
    rounded, cast = engine_of("float32"), engine_of("float32")
    cast.module.teacher.average._products = None
    assert train(rounded, 0, 6) == train(cast, 0, 6)
    kinds = [
        next(one.module.teacher.average.module.model.cross_encoder.parameters()).dtype
        for one in (rounded, cast)
    ]
    assert kinds == [torch.bfloat16, torch.float32]
    found, expected = rounded.module.extra_state(), cast.module.extra_state()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_weights_are_bf16_and_all_that_is_saved_is_float32(tmp_path: Path):
    engine = engine_of("bf16")
    train(engine, 0, 2)
    held = dict(engine.module.named_parameters())
    linear = engine.module.get_submodule("model.text_encoder.layers.0.feed_forward.expand")
    assert linear.weight.dtype == torch.bfloat16
    write_snapshot(engine, tmp_path)
    saved = load_file(tmp_path / WEIGHTS)
    assert {value.dtype for name, value in saved.items() if name in held} == {torch.float32}
    rounded = [name for name, value in held.items() if value.dtype == torch.bfloat16]
    assert any(not torch.equal(saved[name], held[name].float()) for name in rounded)
    assert all(torch.equal(saved[name].bfloat16(), held[name]) for name in rounded)


def test_a_resumed_run_has_the_same_losses(tmp_path: Path):
    engine = engine_of("bf16")
    train(engine, 0, 3)
    write_snapshot(engine, tmp_path)
    extra = {name: value.clone() for name, value in engine.module.extra_state().items()}
    expected = train(engine, 3, 6)
    again = engine_of("bf16")
    again.load(tmp_path)
    again.module.load_extra_state(extra)
    assert train(again, 3, 6) == expected


def test_an_update_that_bf16_cannot_add_is_not_lost():
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    masters = Masters()
    masters.take(layer)
    optimiser = torch.optim.SGD(layer.parameters(), lr=1e-4)
    masters.replace(optimiser)
    for _ in range(100):
        layer.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
        masters.take_gradients()
        optimiser.step()
        masters.give_weights()
    assert float(masters.held()["weight"]) == pytest.approx(0.99, abs=1e-5)
    assert float(layer.weight.detach()) == float(torch.tensor(0.99).bfloat16())


def test_a_weight_with_two_readers_stays_float32():
    first, table = nn.Linear(4, 4), nn.Embedding(4, 4)
    first.weight = table.weight
    both = nn.ModuleList([first, table, nn.LayerNorm(4)])
    Masters().take(both)
    found: dict[str, Tensor] = dict(both.named_parameters())
    assert found["0.weight"].dtype == found["2.weight"].dtype == torch.float32
    assert found["0.bias"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "other",
    [{"engine": "deepspeed"}, {"precision": "float32"}, {"gradient_accumulation_steps": 2}],
)
def test_what_does_not_go_with_bf16_weights_is_named(other: dict[str, Any]):
    (key,) = other
    with pytest.raises(ValueError, match=f"weights=bf16 needs {key}="):
        LoopConfig.model_validate({"weights": "bf16", "precision": "bf16", "engine": "ddp"} | other)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gradient_reduction": "bf16"}, "engine deepspeed takes no gradient_reduction"),
        ({"static_graph": True}, "static_graph is of engine ddp, not deepspeed"),
        ({"engine": "fsdp", "static_graph": True}, "static_graph is of engine ddp, not fsdp"),
        (
            {"checkpoint_every": 300, "keep_every": 1000},
            "keep_every 1000 is no multiple of checkpoint_every 300",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PretrainTrainingConfig.model_validate(values)


def test_their_own_engine_takes_them() -> None:
    ddp = LoopConfig.model_validate({"gradient_reduction": "bf16", "static_graph": True})
    assert ddp.gradient_reduction == "bf16"
    assert ddp.static_graph
    fsdp = PretrainTrainingConfig.model_validate({"engine": "fsdp", "gradient_reduction": "bf16"})
    assert fsdp.gradient_reduction == "bf16"
    kept = LoopConfig.model_validate({"checkpoint_every": 250, "keep_every": 1000})
    assert kept.keep_every == 1000
