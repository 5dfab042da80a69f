"""Where the tokens of padded images lie, for encodings that need a grid."""

from __future__ import annotations

import pytest
import torch
from transformers import Siglip2VisionConfig, Siglip2VisionModel

from vlp.positions import attach

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}


def test_padded_images_of_as_many_tokens_are_no_grid():
    config = Siglip2VisionConfig(**SIZES, num_attention_heads=2, num_patches=16, patch_size=4)
    model = attach(Siglip2VisionModel(config).eval(), "irpe-product")
    patches = torch.randn(1, 16, 48)
    every, some = torch.ones(1, 16).long(), (torch.arange(16) < 12).long()[None]
    model(patches, every, torch.tensor([[4, 4]]))
    with pytest.raises(ValueError, match="irpe-product needs a grid, but these tokens have coord"):
        model(patches, some, torch.tensor([[3, 4]]))
