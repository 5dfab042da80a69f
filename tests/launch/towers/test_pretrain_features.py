"""Pretraining from stored features: the losses of pixels, and one line for what does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import ranks
import torch
from launch_lab import Lab
from safetensors.torch import load_file

import vlp
from data_tools.__main__ import main
from launch.pretrain import build
from vlp.config import ConfigError, load_config
from vlp.data.features.store import StoredFeatures
from vlp.models.folder import require_tower
from vlp.training.config import PretrainConfig

COMMAND = ranks.ROOT / "launch" / "pretrain.py"
TOWER = [
    "model.image.architecture={name: vit_small_patch14_reg4_dinov2, embed_dim: 24, depth: 2, "
    "num_heads: 2}",
    *("model.image.patch_size=14", "model.image.image_size=56", "model.image.trainable=0"),
    *("objectives.mim=null", "training.steps=4", "training.checkpoint_every=2"),
    "data.augment={randaugment: false, crop_scale: [1, 1], hflip: false}",
]


def config_of(lab: Lab, *changes: str) -> PretrainConfig:
    return load_config(lab.config, PretrainConfig, [*TOWER, *changes])


@pytest.fixture(scope="module")
def features(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("features") / "out"
    assert main(["features", "--config", str(lab.config), "--out", str(out), *TOWER]) == 0
    return out


def losses(config: PretrainConfig, count: int = 3) -> list[float]:
    """Of the first batches, without steps between them."""
    task, data = build(config)
    return [
        float(task(batch.to("cpu"), number).loss.detach())
        for number, (batch, _) in enumerate(data.batches(stop_after=count))
    ]


def test_losses_are_those_of_pixels_but_for_rounding(lab, features):
    pixels = losses(config_of(lab))
    stored = losses(config_of(lab, f"data.features={features}"))
    assert stored == pytest.approx(pixels, rel=1e-3)
    assert stored != pixels


@pytest.mark.nightly
def test_a_resumed_run_is_bitwise_the_same(lab, features):
    moved = features.with_name("moved")
    moved.symlink_to(features)
    whole, again = map(lab.output, ("whole_features", "again_features"))
    ranks.run([COMMAND, *lab.arguments(whole.name, *TOWER, f"data.features={features}")], 1)
    shutil.copytree(whole / "checkpoints" / "step_2", again / "checkpoints" / "step_2")
    command = [COMMAND, *lab.arguments(again.name, *TOWER, f"data.features={moved}"), "--resume"]
    ranks.run(command, 1)
    first, last = (
        load_file(run / "checkpoints" / "step_4" / "weights.safetensors") for run in (whole, again)
    )
    assert all(torch.equal(first[name], last[name]) for name in first | last)
    require_tower(StoredFeatures(features), vlp.load(whole / "model").model)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.image.trainable=1", "set model.image.trainable=0"),
        ("training.seed=1", "weights is '"),
        ("model.image.architecture=vit_small_patch14_dinov2", "tower.architecture is {'name'"),
        ("model.image.architecture.depth=3", "tower.architecture.depth is 2 there"),
        ("model.image.image_size=28", "image_size is 56 there, 28 here"),
        (
            "model.image.normalisation=[[0, 0, 0], [0.5, 0.5, 0.5]]",
            "mean is [0.485, 0.456, 0.406] there, [0.0, 0.0, 0.0] here",
        ),
        ("objectives.mim={}", "objectives.mim regresses pixels, and data.features gives none"),
    ],
)
def test_what_does_not_fit_is_one_sentence(lab, features, change, said):
    with pytest.raises(ConfigError) as error:
        build(config_of(lab, f"data.features={features}", change))
    assert said in str(error.value)
    assert "\n" not in str(error.value).strip()


def test_features_are_pooled_before_or_after(lab, tmp_path, features):
    pool = "model.image.pool=2"
    out = tmp_path / "pooled"
    command = ["features", "--config", str(lab.config), "--out", str(out), *TOWER, pool]
    assert main(command) == 0
    header = json.loads((out / "features.json").read_text())
    assert header["tokens"] == 1 + 4
    early = losses(config_of(lab, f"data.features={out}", pool))
    late = losses(config_of(lab, f"data.features={features}", pool))
    assert early == pytest.approx(late, rel=1e-3)
    with pytest.raises(
        ConfigError, match=r"holds 5 tokens of an image, and image.pool 1 asks for 17"
    ):
        build(config_of(lab, f"data.features={out}"))
