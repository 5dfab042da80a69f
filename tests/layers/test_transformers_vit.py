"""`attach` on vision transformers of transformers: which are refused, and pickles of the others."""

from __future__ import annotations

import pytest
import transformers

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
