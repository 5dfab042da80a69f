"""A step whose outcome is not read: fused AdamW clips and skips by tensors, here on the CPU."""

import pytest
import torch
from training_toy import ToyData, ToyTask, toy_config

from vlp.training.engines import ddp
from vlp.training.engines.ddp import DdpEngine
from vlp.training.optimiser import build_adamw


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
