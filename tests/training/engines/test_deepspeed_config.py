import json
from pathlib import Path
from typing import Any

import pytest

from vlp.config import ConfigError
from vlp.training.config import TrainingConfig
from vlp.training.engines.deepspeed import deepspeed_config
from vlp.training.optimiser import OptimiserConfig


def write(folder: Path, values: Any) -> TrainingConfig:
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
        ({}, "stage must be 0, 1, 2 or 3"),
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
