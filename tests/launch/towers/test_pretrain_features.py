import json

import pytest
import torch

import vlp
from data_tools.__main__ import main
from launch.pretrain import build
from vlp.config import ConfigError, load_config
from vlp.data.features.store import StoredFeatures
from vlp.models.folder import require_tower
from vlp.training.config import PretrainConfig

FROZEN = [
    "model.image.architecture={name: vit_small_patch14_reg4_dinov2, embed_dim: 24, depth: 2, "
    "num_heads: 2}",
    *("model.image.patch_size=14", "model.image.image_size=56", "model.image.trainable=0"),
    *("objectives.mim=null", "training.steps=4", "training.checkpoint_every=2"),
]
TOWER = [*FROZEN, "data.augment={randaugment: false, crop_scale: [1, 1], hflip: false}"]


def config_of(lab, *changes):
    return load_config(lab.config, PretrainConfig, [*TOWER, *changes])


@pytest.fixture(scope="module")
def features(lab, tmp_path_factory):
    out = tmp_path_factory.mktemp("features") / "out"
    assert main(["features", "--config", str(lab.config), "--out", str(out), *TOWER]) == 0
    return out


def losses(config, count=3):
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


def require_same_resumed(lab, name, first, second, world_size):
    whole, again = f"whole_{name}", f"again_{name}"
    lab.train(whole, *first, world_size=world_size)
    lab.begin_with(whole, 2, again)
    lab.train(again, *second, "--resume", world_size=world_size)
    weights = [lab.weights(whole, 2), lab.weights(whole, 4), lab.weights(again, 4)]
    assert all(torch.equal(weights[1][key], weights[2][key]) for key in weights[1] | weights[2])
    return weights, vlp.load(lab.output(whole) / "model")


@pytest.mark.nightly
def test_a_resumed_run_of_features_is_bitwise_the_same(lab, features):
    moved = features.with_name("moved")
    moved.symlink_to(features)
    first, second = ([*TOWER, f"data.features={folder}"] for folder in (features, moved))
    _, loaded = require_same_resumed(lab, "features", first, second, 1)
    require_tower(StoredFeatures(features), loaded.model)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_towers_stay_and_a_resumed_run_is_bitwise_the_same(lab, stage):
    more = [*FROZEN, "model.image.pool=2", "model.text.trainable=0", lab.zero(stage)]
    more += ["training.optimiser.lr_multipliers={}"]
    (first, last, _), loaded = require_same_resumed(lab, f"towers_{stage}", more, more, 2)
    moved = {name for name in last if not torch.equal(first[name], last[name])}
    towers = ("image_encoder.vit.", "text_encoder.embedding.", "text_encoder.layers.")
    assert not [name for name in moved if any(tower in name for tower in towers)]
    assert {"model.image_encoder.adapter.weight", "model.text_encoder.projection.weight"} <= moved
    assert loaded.model.config.image.grid == (2, 2)
    assert loaded.preprocess.mean == (0.485, 0.456, 0.406)
    saved = last["model.image_encoder.vit.blocks.1.ls1.gamma"]
    assert torch.equal(loaded.model.image_encoder.vit.blocks[1].ls1.gamma, saved)


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
        ("objectives.mim={}", "objectives.mim regresses pixels, and data.features holds none"),
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
    with pytest.raises(ConfigError, match=r"has 5 tokens per image, and image.pool 1 needs 17"):
        build(config_of(lab, f"data.features={out}"))
