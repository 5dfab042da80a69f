"""Steps of pretraining: as written, compiled, and in the form for a GPU with its kernels."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from compile_toy import ROWS, configuration

from benchmarks.step import random_batch
from vlp.compilation import gpu_form
from vlp.tasks.pretraining import Pretraining
from vlp.training.config import PretrainConfig
from vlp.training.engines.compile import compile_task
from vlp.training.engines.ddp import DdpEngine

CPU = torch.device("cpu")


STEPS = 200


def losses(how: str, rows: int, text_window: int) -> list[float]:
    """Train with AdamW, a teacher and its queue."""
    values = configuration().model_dump()
    values["objectives"] |= {"teacher": {"queue": 16, "warmup_steps": 10}, "itm": {"group": rows}}
    values["model"]["cross"]["options"] = {"anchor": {"text_window": text_window}}
    values["training"]["batch"] = rows
    config = PretrainConfig.model_validate(values)
    torch.manual_seed(0)
    task = Pretraining(config.model, config.objectives, "", "float32", log_every=10**6)
    compile_task(task, "none" if how == "fused" else how, CPU)  # type: ignore[arg-type]
    engine = DdpEngine(task, config.training)
    found = []
    for step in range(STEPS):
        batch: Any = random_batch(config.inputs, rows, 5, seed=step)
        output = engine.forward(batch, step)
        engine.backward(output.loss)
        update = engine.step(1e-4)
        task.after_step(engine.parameters, torch.tensor(update.applied))
        found.append(float(output.loss.detach()))
    return found


def test_a_teacher_that_keeps_rounded_weights_changes_no_bit():
    """Against one whose weights autocast casts in each call."""
    found = []
    for rounded in (True, False):
        values = configuration().model_dump()
        values["objectives"]["teacher"] = {"queue": 16, "warmup_steps": 10}
        values["training"] |= {"precision": "bf16", "engine": "ddp"}
        config = PretrainConfig.model_validate(values)
        torch.manual_seed(0)
        task = Pretraining(config.model, config.objectives, "", "bf16", log_every=10**6)
        engine = DdpEngine(task, config.training)
        if not rounded:
            task.teacher.average._products = None
        losses = []
        for step in range(6):
            batch: Any = random_batch(config.inputs, ROWS, 5, seed=step)
            output = engine.forward(batch, step)
            engine.backward(output.loss)
            update = engine.step(1e-3)
            task.after_step(engine.parameters, torch.tensor(update.applied))
            losses.append(float(output.loss.detach()))
        teacher = task.teacher.average.module.model.cross_encoder
        kind = next(teacher.parameters()).dtype
        assert kind == (torch.bfloat16 if rounded else torch.float32)
        found.append((losses, task.extra_state()))
    (losses, state), (expected, expected_state) = found
    assert losses == expected
    assert all(torch.equal(state[name], value) for name, value in expected_state.items())


@pytest.mark.nightly  # minutes of compiling, or of interpreting
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("how", "rows", "text_window"),
    # A kernel's program is one pair's, and the interpreter takes each step of a window by itself.
    [("blocks", ROWS, 5), ("step", ROWS, 5), ("fused", 2, 3)],
)
def test_steps_have_the_same_losses(how, rows, text_window):
    as_written = losses("none", rows, text_window)
    fused = pytest.importorskip("interpreted_triton").interpreted() if how == "fused" else None
    with fused or nullcontext(), gpu_form() if fused else nullcontext():
        found = losses(how, rows, text_window)
    pairs = list(zip(found, as_written, strict=True))
    farthest = max(abs(a - b) / b for a, b in pairs)
    equal = sum(a == b for a, b in pairs)
    print(f"{how}: losses of {max(found):.1f} differ by at most {farthest:.1e} of themselves, "
          f"{max(abs(a - b) for a, b in pairs):.1e}; {equal} of {STEPS} are equal")  # fmt: skip
    assert farthest < 1e-5
