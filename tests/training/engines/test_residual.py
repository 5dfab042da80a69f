"""`training.residual`: streams of every encoder in half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compile_toy import ROWS, configuration, task_of

from evaluation.benchmarks.pretrain_step import random_batch
from vlp.layers.blocks import LayerNorm, ResidualStream, set_half_streams


def test_all_streams_of_the_encoders_are_rounded_and_losses_stay_near():
    task = task_of(configuration())
    task.precision = "bf16"
    batch: Any = random_batch(configuration().inputs, ROWS, 5)
    seen: list[torch.dtype] = []
    for part in task.modules():
        if isinstance(part, ResidualStream | LayerNorm):
            part.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    kept = task(batch, 0).loss
    assert set(seen) == {torch.float32}
    seen.clear()
    set_half_streams(task, True)
    rounded = task(batch, 0).loss
    assert set(seen) == {torch.bfloat16}
    assert float(rounded.detach()) == pytest.approx(float(kept.detach()), rel=0.01)
