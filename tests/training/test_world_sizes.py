"""The shipped configurations train on every number of GPUs that docs/how-to/scale.md promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlp.config import ConfigError, load_config
from vlp.objectives.loss import require_whole_groups
from vlp.training.config import PretrainConfig

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"base": (512, 64), "base_8": (960, 120), "base_64": (7680, 960),
         "base_256": (30_720, 3840), "base_1024": (122_880, 15_360)}  # fmt: skip
"""Batch and most GPUs; every divisor of the latter can train."""


@pytest.mark.parametrize(("name", "batch", "most"), [(name, *two) for name, two in SIZES.items()])
def test_promised_gpus_share_streams_and_hold_whole_groups(name, batch, most):
    config = load_config(ROOT / f"configs/pretrain/{name}.yaml", PretrainConfig)
    assert config.training.batch == batch
    sizes = [size for size in range(1, most + 1) if most % size == 0]
    for size in sizes:
        assert config.data.canonical_streams % size == 0
        require_whole_groups(config.objectives, config.training.batch, size)
    assert config.world_sizes() == sizes


@pytest.mark.parametrize(
    ("name", "left"), [("base_8", 6), ("base_64", 48), ("base_256", 240), ("base_1024", 960)]
)
def test_what_is_left_after_a_lost_node_can_train(name, left):
    config = load_config(ROOT / f"configs/pretrain/{name}.yaml", PretrainConfig)
    assert config.data.canonical_streams % left == 0
    require_whole_groups(config.objectives, config.training.batch, left)


def test_world_sizes_are_those_that_no_rule_refuses():
    objectives = {"itm": {"group": 8}, "contrastive": {"token": {"group": 6}}}
    base = {"objectives": objectives, "data": {"sources": ["none"], "canonical_streams": 24}}
    config = PretrainConfig.model_validate(base | {"training": {"batch": 144}})
    able = [n for n in range(1, 145) if 24 % n == 0 and 144 % (24 * n) == 0]
    assert config.world_sizes() == able == [1, 2, 3, 6]
    chunked = config.training.model_copy(update={"grad_cache": 32})
    assert config.model_copy(update={"training": chunked}).world_sizes() == [6]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (4, "group 8 does not divide a rank's 36 samples .*; 3 or 6 can"),
        (5, "batch 144 cannot be shared equally by 5 ranks; 3 or 6 can"),
        (144, "; 6 can"),
    ],
)
def test_the_nearest_numbers_of_ranks_are_named(ranks, message):
    objectives = {"itm": {"group": 8}, "contrastive": {"token": {"group": 6}}}
    base = {"objectives": objectives, "data": {"sources": ["none"], "canonical_streams": 24}}
    config = PretrainConfig.model_validate(base | {"training": {"batch": 144}})
    with pytest.raises(ConfigError, match=message):
        config.require_world_size(ranks)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate_every": 2}, "evaluate_every needs .*validation"),
        ({"timeout": float("inf")}, "finite"),
    ],
)
def test_a_training_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PretrainConfig.model_validate({"data": {"sources": ["none"]}, "training": changes})


@pytest.mark.parametrize(("given", "read"), [(True, "blocks"), (False, "none"), (2, 2)])
def test_checkpointing_of_activations_may_be_true_or_false(given, read):
    training = {"activation_checkpointing": given}
    config = PretrainConfig.model_validate({"data": {"sources": ["none"]}, "training": training})
    assert config.training.activation_checkpointing == read


def test_a_resampled_stream_knows_no_streams():
    data = {"sources": ["none"], "epoch_samples": 1000}
    config = PretrainConfig.model_validate(
        {
            "data": data | {"canonical_streams": 4},
            "objectives": {"contrastive": {"kind": "itc"}, "itm": {"group": 2}},
            "training": {"batch": 24},
        }
    )
    assert config.world_sizes() == [1, 2, 3, 4, 6, 12]
