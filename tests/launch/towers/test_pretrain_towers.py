"""Pretraining on frozen towers: checkpoints, a resume that is bit-exact, weights that stay."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import ranks
import torch
from launch_lab import Lab
from safetensors.torch import load_file

import vlp

COMMAND = ranks.ROOT / "launch" / "pretrain.py"
TOWER = (
    "model.image.architecture={name: vit_small_patch14_reg4_dinov2, embed_dim: 24, depth: 2, "
    "num_heads: 2}",
    *("model.image.patch_size=14", "model.image.image_size=56", "model.image.pool=2"),
)
STEPS = ("objectives.mim=null", "training.steps=4", "training.checkpoint_every=2")


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_towers_stay_and_a_resumed_run_is_bitwise_the_same(lab: Lab, stage: int) -> None:
    names, more = [f"{kind}_towers_{stage}" for kind in ("whole", "again")], list(TOWER + STEPS)
    more += ["model.image.trainable=0", "model.text.trainable=0", lab.zero(stage)]
    more += ["training.optimiser.lr_multipliers={}"]
    ranks.run([COMMAND, *lab.arguments(names[0], *more)], 2)
    whole, again = map(lab.output, names)
    shutil.copytree(whole / "checkpoints" / "step_2", again / "checkpoints" / "step_2")
    ranks.run([COMMAND, *lab.arguments(names[1], *more), "--resume"], 2)

    def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
        return load_file(run / "checkpoints" / f"step_{step}" / "weights.safetensors")

    first, last, resumed = weights(whole, 2), weights(whole, 4), weights(again, 4)
    assert all(torch.equal(last[name], resumed[name]) for name in last | resumed)
    moved = {name for name in last if not torch.equal(first[name], last[name])}
    towers = ("image_encoder.vit.", "text_encoder.embedding.", "text_encoder.layers.")
    assert not [name for name in moved if any(tower in name for tower in towers)]
    assert {"model.image_encoder.adapter.weight", "model.text_encoder.projection.weight"} <= moved
    loaded = vlp.load(whole / "model")
    assert loaded.model.config.image.grid == (2, 2)
    assert loaded.preprocess.mean == (0.485, 0.456, 0.406)
    saved = last["model.image_encoder.vit.blocks.1.ls1.gamma"]
    assert torch.equal(loaded.model.image_encoder.vit.blocks[1].ls1.gamma, saved)
