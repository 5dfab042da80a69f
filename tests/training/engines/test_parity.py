"""Steps of pretraining: as written, compiled, and in the form for a GPU with its kernels."""

from contextlib import nullcontext

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


def trained(values, precision, steps, rate, how="none", before=lambda task: None):
    """A task after steps of AdamW, with a teacher and its queue; returns its losses, too."""
    values["objectives"] |= {"teacher": {"queue": 16, "warmup_steps": 10}}
    values["training"] |= {"precision": precision, "engine": "ddp"}
    config = PretrainConfig.model_validate(values)
    torch.manual_seed(0)
    task = Pretraining(config.model, config.objectives, "", precision, log_every=10**6)
    compile_task(task, how, CPU)
    engine = DdpEngine(task, config.training)
    before(task)
    losses = []
    for step in range(steps):
        batch = random_batch(config.inputs, config.training.batch, 5, seed=step)
        output = engine.forward(batch, step)
        engine.backward(output.loss)
        update = engine.step(rate)
        task.after_step(engine.parameters, torch.tensor(update.applied))
        losses.append(float(output.loss.detach()))
    return task, losses


def test_a_teacher_that_keeps_rounded_weights_changes_no_bit():
    """Against one whose weights autocast casts in each call."""

    def unrounded(task):
        task.teacher.average._products = None

    found = []
    for before, expected in ((lambda task: None, torch.bfloat16), (unrounded, torch.float32)):
        task, losses = trained(configuration().model_dump(), "bf16", 6, 1e-3, before=before)
        teacher = task.teacher.average.module.model.cross_encoder
        assert next(teacher.parameters()).dtype == expected
        found.append((losses, task.extra_state()))
    (losses, state), (expected, expected_state) = found
    assert losses == expected
    assert all(torch.equal(state[name], value) for name, value in expected_state.items())


def losses(how, rows, text_window):
    values = configuration().model_dump()
    values["objectives"]["itm"] = {"group": rows}
    values["model"]["cross"]["options"] = {"anchor": {"text_window": text_window}}
    values["training"]["batch"] = rows
    return trained(values, "float32", STEPS, 1e-4, how="none" if how == "fused" else how)[1]


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
