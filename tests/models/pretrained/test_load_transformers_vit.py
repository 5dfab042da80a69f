"""ViT and DeiT as transformers stores them: the same numbers out as from transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import DeiTConfig, DeiTModel, ViTConfig, ViTModel

from vlp.config import ConfigError
from vlp.models.config import ModelConfig
from vlp.models.pretrained.load import load_public_weights
from vlp.models.pretrained.published import timm_names
from vlp.models.vlp import VLPModel


def loaded(name, layers, heads=3):
    config = ModelConfig.model_validate(
        {
            "text": {"vocab_size": 50, "width": 192, "layers": 1, "heads": 3, "intermediate": 64,
                     "max_positions": 20, "max_tokens": 12},
            "image": {"image_size": 64, "width": 192, "heads": heads, "intermediate": 768,
                      "layers": layers, "weights": str(name)},
            "cross": {"layers": 1, "heads": 3, "intermediate": 64},
        }
    )  # fmt: skip
    model = VLPModel(config).eval()
    (report,) = load_public_weights(model)
    return model.image_encoder, report


@torch.no_grad()
@pytest.mark.parametrize(("epsilon", "noted"), [(1e-6, False), (1e-12, True)])
def test_a_folder_of_transformers(tmp_path, epsilon, noted):
    sizes = {"hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 3,
             "intermediate_size": 768, "image_size": 64}  # fmt: skip
    torch.manual_seed(5)
    vit = ViTModel(ViTConfig(**sizes, layer_norm_eps=epsilon)).eval()
    for parameter in vit.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)
    vit.save_pretrained(tmp_path)
    encoder, report = loaded(tmp_path, 2)
    pixels = torch.randn(2, 3, 64, 64)
    # Of faint random patches another epsilon is seen, which is why it is noted.
    close = 1e-3 if noted else 1e-5
    theirs = vit(pixels).last_hidden_state
    torch.testing.assert_close(encoder(pixels), theirs, rtol=close, atol=close)
    note = "norms add 1e-12 to the variance there, 1e-06 here"
    assert report.notes == ((note,) if noted else ())
    with pytest.raises(ConfigError, match=r"it has 3 heads and image.heads is 6"):
        loaded(tmp_path, 2, heads=6)


def test_a_distilled_folder_of_transformers(tmp_path):
    sizes = {"hidden_size": 192, "num_hidden_layers": 1, "num_attention_heads": 3,
             "intermediate_size": 768, "image_size": 64}  # fmt: skip
    deit = DeiTModel(DeiTConfig(**sizes))
    torch.nn.init.normal_(deit.embeddings.position_embeddings)
    deit.save_pretrained(tmp_path)
    encoder, report = loaded(tmp_path, 1)
    theirs = deit.embeddings.position_embeddings
    assert torch.equal(encoder.vit.pos_embed[:, 0], theirs[:, 0])
    assert torch.equal(encoder.vit.pos_embed[:, 1:], theirs[:, 2:])
    assert report.notes[0] == "the distillation token and its position are left out"


def test_keys_that_do_not_fit_are_named():
    layer = "vit.encoder.layer.0.attention.attention"
    with pytest.raises(ValueError, match=r"hub/vit: no rule maps these keys of a ViT: vit.extra"):
        timm_names({"vit.extra": torch.zeros(1)}, "hub/vit")
    with pytest.raises(ValueError, match=r"hub/vit: blocks.0.attn.qkv.weight lacks its key and"):
        timm_names({f"{layer}.query.weight": torch.zeros(2, 2)}, "hub/vit")
