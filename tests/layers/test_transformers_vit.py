"""`attach` on vision transformers of transformers: which are refused, and pickles of the others."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers
from torch import nn

from vlp.positions import attach

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
IMAGES = {"image_size": 16, "patch_size": 4}


def data2vec():
    config = transformers.Data2VecVisionConfig(**SIZES, **IMAGES, num_hidden_layers=1)
    return transformers.Data2VecVisionModel(config)


def group_vit():
    groups = {"depths": [1, 1], "num_group_tokens": [4, 0], "num_output_groups": [4, 0]}
    config = transformers.GroupViTVisionConfig(**SIZES, **IMAGES, **groups)
    return transformers.GroupViTVisionModel(config)


@pytest.mark.parametrize("make", [data2vec, group_vit])
def test_models_whose_attention_would_not_heed_encodings_are_refused(make):
    with pytest.raises(ValueError, match="has not layers of attention that encodings could enter"):
        attach(make(), "irpe-product")


def test_a_pickled_model_runs_in_a_process_that_imports_nothing_else(tmp_path):
    config = transformers.ViTConfig(**SIZES, **IMAGES, num_hidden_layers=1)
    model = attach(transformers.ViTModel(config).eval(), "irpe-product")
    nn.init.normal_(model.layers[0].attention.positions[0].tables["key"])
    images = torch.randn(1, 3, 16, 16)
    torch.save((model, images, model(images).last_hidden_state), tmp_path / "model.pt")
    run = (
        "import sys, torch\n"
        "model, images, expected = torch.load(sys.argv[1], weights_only=False)\n"
        "torch.testing.assert_close(model(images).last_hidden_state, expected)\n"
    )
    command = [sys.executable, "-c", run, str(tmp_path / "model.pt")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
