"""ZeRO 0-3 and DDP on CPU ranks: against plain PyTorch, and the pretraining task on each."""

import json
from pathlib import Path

import pytest
import ranks

from vlp.config import ConfigError
from vlp.training.config import TrainingConfig
from vlp.training.engines.deepspeed import deepspeed_config
from vlp.training.optimiser import OptimiserConfig

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
