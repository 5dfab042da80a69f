"""What is counted of few pairs on fake tensors, against more pairs and what autograd saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted_triton import interpreted
from tests_support import TINY_MODEL
from torch import Tensor

from evaluation.benchmarks.planning.count import _count, count_groups, scale
from evaluation.benchmarks.planning.plan import with_training
from evaluation.benchmarks.pretrain_step import random_batch
from vlp.compilation import gpu_form
from vlp.config import load_config
from vlp.tasks.pretraining import Pretraining
from vlp.training.config import PretrainConfig

CONFIG = Path(__file__).parents[4] / "configs/pretrain/base.yaml"
GROUP = 4


def tiny(batch: int = 128, **objectives: Any) -> PretrainConfig:
    asked = {
        "contrastive": {"token": {"group": GROUP}},
        "itm": {"group": GROUP},
        "teacher": {"queue": 8},
    }
    return PretrainConfig.model_validate(
        {
            "model": TINY_MODEL,
            "data": {"sources": ["none"], "canonical_streams": 1},
            "objectives": asked | objectives,
            "training": {"batch": batch, "precision": "float32"},
        }
    )


def saved_bytes(task: Pretraining, config: PretrainConfig, rows: int) -> int:
    """Bytes that a real forward pass saves for the backward pass, beside parameters."""
    own = {p.untyped_storage()._cdata for p in task.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    batch = random_batch(config.inputs, rows, 10)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with interpreted(), gpu_form(), hooks:
        output = task(batch, 1)
    assert output.loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.integration
@pytest.mark.parametrize(
    "training",
    [{}, {"activation_checkpointing": "blocks"}, {"grad_cache": 8}],
    ids=["whole", "blocks", "chunks"],
)
def test_more_pairs_lie_on_the_line_of_few(training: dict[str, Any]) -> None:
    config = with_training(tiny(), **training)
    predicted = scale(config, count_groups(config, 32), 4)
    counted = _count(config, 32, 15)
    for reading in ("fused", "as written"):
        assert predicted.peak[reading] == pytest.approx(counted.peak[reading], rel=0.06)
        assert predicted.work[reading].flops == pytest.approx(counted.work[reading].flops, rel=0.06)
    if training:
        whole = scale(tiny(), count_groups(tiny(), 32), 4)
        assert predicted.peak["as written"] < 0.8 * whole.peak["as written"]
        assert predicted.work["fused"].flops > 1.05 * whole.work["fused"].flops


@pytest.mark.parametrize(
    "rows",
    [pytest.param(8, marks=pytest.mark.integration), pytest.param(16, marks=pytest.mark.slow)],
)
def test_activations_are_what_autograd_saves(rows: int) -> None:
    config = tiny(batch=rows)
    task = Pretraining(config.model, config.objectives, "", log_every=10**6)
    task.model.anchor_threshold.fill_(0.05)
    kept = scale(config, [_count(config, rows, 10)], 1).kept
    assert kept["as written"] == pytest.approx(saved_bytes(task, config, rows), rel=0.1)
    assert kept["fused"] < kept["as written"]


def test_the_task_itself_makes_few_calls_whose_bytes_grow_with_the_batch() -> None:
    config = tiny(batch=GROUP * 64)
    counted = count_groups(config, GROUP)
    calls = scale(config, counted, 64).collectives
    assert {one.name: (one.calls, one.bytes) for one in calls} == {
        "contrastive keys": (2, GROUP * 64 * (2 * 8 * 4 + 8 + 8)),
        "counts of losses": (1, 8 * 7),
        "anchor threshold": (1, 8 * 4000),
    }
    assert scale(config, counted, 1).collectives == []


def test_keys_that_have_gradients_send_them_back() -> None:
    config = tiny(batch=GROUP * 8, teacher=None)
    calls = scale(config, count_groups(config, GROUP), 8).collectives
    found = {one.name: (one.kind, one.calls, one.bytes) for one in calls}
    assert found["gradients of keys"] == ("reduce_scatter", 2, GROUP * 8 * 2 * 8 * 4)


@pytest.mark.integration
@pytest.mark.parametrize("rows", [24, 512])
def test_base_lies_on_its_line(rows: int) -> None:
    """As 32,768 pairs on 64 GPUs have 512 each; with blocks computed again the peak moves."""
    batch = rows * 64
    config = load_config(CONFIG, PretrainConfig, [f"training.batch={batch}"])
    config = with_training(config, activation_checkpointing="blocks" if rows == 512 else "none")
    predicted = scale(config, count_groups(config, rows), 64)
    counted = _count(config, rows, 15)
    for reading in ("fused", "as written"):
        near = pytest.approx(counted.peak[reading], rel=0.03 if rows == 24 else 0.15)
        assert predicted.peak[reading] == near
