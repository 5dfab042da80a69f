"""Steps of pretraining: as written, compiled, and in the form for a GPU with its kernels."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from compile_toy import ROWS, configuration

from evaluation.benchmarks.pretrain_step import random_batch
from vlp.compute.gpu_form import gpu_form
from vlp.tasks.pretraining import Pretraining
from vlp.training.config import PretrainConfig
from vlp.training.engines.compile import compile_task
from vlp.training.engines.ddp import DdpEngine

CPU = torch.device("cpu")


def losses(how: str, steps: int) -> list[float]:
    """Train with AdamW, a teacher and its queue."""
    values = configuration().model_dump()
    values["objectives"]["teacher"] = {"queue": 16, "warmup_steps": 10}
    config = PretrainConfig.model_validate(values)
    torch.manual_seed(0)
    task = Pretraining(config.model, config.objectives, "", "float32", log_every=10**6)
    compile_task(task, "none" if how == "fused" else how, CPU)  # type: ignore[arg-type]
    engine = DdpEngine(task, config.training)
    found = []
    for step in range(steps):
        batch: Any = random_batch(config.inputs, ROWS, 5, seed=step)
        output = engine.forward(batch, step)
        engine.backward(output.loss)
        update = engine.step(1e-4)
        task.after_step(engine.parameters, torch.tensor(update.applied))
        found.append(float(output.loss.detach()))
    return found


@pytest.fixture(scope="module")
def as_written() -> list[float]:
    return losses("none", 200)


@pytest.mark.slow  # minutes of compiling, or of interpreting
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("how", "steps"), [("blocks", 200), ("step", 200), ("fused", 10)])
def test_steps_have_the_same_losses(how: str, steps: int, as_written: list[float]) -> None:
    fused = pytest.importorskip("interpreted_triton").interpreted() if how == "fused" else None
    with fused or nullcontext(), gpu_form() if fused else nullcontext():
        found = losses(how, steps)  # the interpreter takes seconds a step
    farthest = max(abs(a - b) / b for a, b in zip(found, as_written))
    print(f"{how}: losses of {max(found):.1f} differ by at most {farthest:.1e} of themselves")
    assert farthest < 1e-5
