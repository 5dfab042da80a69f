"""Public BERT and ViT weights: same numbers out as the libraries they come from."""

from __future__ import annotations

import pytest
import timm
import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertModel

from vlp.models.config import ModelConfig
from vlp.models.pretrained.load import load_public_weights, load_vit
from vlp.models.vlp import VLPModel


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=50, hidden_size=192, num_hidden_layers=4, num_attention_heads=3,
        intermediate_size=64, max_position_embeddings=20,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertModel(config).eval()
    folder = tmp_path_factory.mktemp("bert")
    model.save_pretrained(folder)
    return model, str(folder)


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False).eval()
    file = tmp_path_factory.mktemp("vit") / "vit.safetensors"
    save_file(model.state_dict(), file)
    return model, str(file)


def config(bert_folder=None, vit_file=None, image_size=224, image_layers=12, **cross):
    return ModelConfig.model_validate(
        {
            "text": {"vocab_size": 50, "width": 192, "layers": 2, "heads": 3, "intermediate": 64,
                     "max_positions": 20, "max_tokens": 12, "weights": bert_folder},
            "image": {"image_size": image_size, "width": 192, "layers": image_layers, "heads": 3,
                      "intermediate": 768, "weights": vit_file},
            "cross": {"layers": 2, "heads": 3, "intermediate": 64, **cross},
        }
    )  # fmt: skip


def test_positions_without_a_square_grid_are_an_error(vit):
    reference, _ = vit
    state = dict(reference.state_dict()) | {"pos_embed": torch.zeros(1, 13, 192)}
    with pytest.raises(ValueError, match=r"vit: positions \(1, 13, 192\) are not"):
        load_vit(VLPModel(config()), state, "vit")


@pytest.mark.parametrize("layout", ["ace", "text"])
@pytest.mark.parametrize("mode", ["contextual", "bias"])
@pytest.mark.parametrize(
    ("fused", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.float64)]
)
def test_zero_tables_change_nothing(bert, vit, layout, mode, fused, dtype):
    pixels, ids = torch.randn(2, 3, 32, 32, dtype=dtype), torch.randint(5, 50, (2, 7))
    attention = torch.arange(7) < torch.tensor([[7], [5]])
    words = attention & (torch.arange(7) > 0) & (torch.arange(7) < torch.tensor([[6], [4]]))
    given = []
    for position in (("anchor",), ()):
        torch.manual_seed(5)  # cross-attention and projections have no public weights
        options = {"anchor": {"mode": mode}} if position else {}
        sizes = config(bert[1], vit[1], 32, 1, layout=layout, position=position, options=options)
        model = VLPModel(sizes).to(dtype).eval()
        load_public_weights(model)
        model.anchor_threshold.fill_(0.1)
        for layer in model.cross_encoder.layers:
            layer.attention.fused = layer.cross_attention.fused = fused
        with torch.no_grad():
            image = model.encode_image(pixels)
            text = model.encode_text(ids, attention, words)
            crossed = model.cross(image, text)
            given.append([crossed.text] if fused else [crossed.text, model.match(image, text)])
            if layout == "ace":
                given[-1].append(crossed.image)
            if position:
                # There are paths, and with other tables they would be seen.
                assert crossed.anchors.reachable.any()
                for name, parameter in model.named_parameters():
                    if "table" in name:
                        parameter.normal_()
                assert (model.cross(image, text).text - crossed.text).abs().max() > 1e-2
    for ours, without in zip(*given, strict=True):
        if fused:  # another kernel: a few roundings, of the largest value
            close = 1e-6 if dtype == torch.float32 else 1e-12
            assert (ours - without).abs().max() <= close * without.abs().max()
        else:
            assert torch.equal(ours, without)


def test_wrong_shapes_name_both_sizes(vit):
    reference, _ = vit
    model = VLPModel(config(image_layers=1))
    state = dict(reference.state_dict())
    state["cls_token"] = torch.zeros(1, 1, 64)
    with pytest.raises(ValueError, match=r"vit.cls_token is \(1, 1, 64\) there and \(1, 1, 192\)"):
        load_vit(model, state, "vit")


def test_missing_files_are_named():
    with pytest.raises(FileNotFoundError, match=r"image.weights: there is no file .*none.pth"):
        load_public_weights(VLPModel(config(vit_file="/nowhere/none.pth", image_layers=1)))
    with pytest.raises(FileNotFoundError, match=r"text.weights: cannot load /nowhere"):
        load_public_weights(VLPModel(config("/nowhere", image_layers=1)))
