import pytest
import torch
from tests_support import tiny_config, tiny_text

import vlp
from vlp.config import ConfigError
from vlp.data.image.transforms import Preprocessing
from vlp.models import lora
from vlp.models.folder import save_pretrained
from vlp.models.lora import add_lora, merge_lora
from vlp.models.vlp import VLPModel
from vlp.training.optimiser import parameter_groups

SMALL = {"name": "vit_small_patch14_reg4_dinov2", "embed_dim": 24, "depth": 2, "num_heads": 2}
TIMM = {"architecture": SMALL, "patch_size": 14, "image_size": 28, "trainable": "lora-2"}
BERT = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 16}  # fmt: skip
LORA = {"trainable": "lora-8"}
SIDES = {
    "own": {"text": LORA, "image": LORA},
    "from outside": {
        "text": {"architecture": {"model_type": "bert", **BERT}, "trainable": "lora-3"},
        "image": TIMM,
    },
}


def model(**sides):
    torch.manual_seed(0)
    return VLPModel(tiny_config(**sides)).eval()


def outputs(built):
    side = built.config.image.image_size
    pixels = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    ids, mask = torch.arange(12)[None], torch.ones(1, 12, dtype=torch.bool)
    return [built.image_encoder(pixels), built.text_encoder(ids, mask)]


@pytest.mark.parametrize("sides", SIDES.values(), ids=SIDES)
def test_low_rank_weights_alone_are_trained_and_a_folder_needs_none(sides, tmp_path):
    pytest.importorskip("peft")
    built = model(**sides)
    before = {name: tensor.clone() for name, tensor in built.state_dict().items()}
    plain = outputs(built)
    add_lora(built)
    assert all(torch.equal(*pair) for pair in zip(plain, outputs(built)))
    for group in parameter_groups(built, 0.1, {}):
        for parameter in group["params"]:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    trained = outputs(built)
    assert not any(torch.allclose(*pair, atol=1e-2) for pair in zip(plain, trained))
    save_pretrained(tmp_path, built.config, built.state_dict(), tiny_text(), Preprocessing(16))
    loaded = vlp.load(tmp_path).model
    assert loaded.config.text.trainable == "all"
    assert loaded.config.image.trainable == "all"
    for mine, theirs in zip(outputs(loaded), trained):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    towers = ("text_encoder.", "image_encoder.")
    moved = {
        name.rpartition(".")[0].rpartition(".")[2]
        for name, tensor in loaded.state_dict().items()
        if name.startswith(towers) and not torch.equal(tensor, before[name])
    }
    assert moved <= {"query", "value", "qkv", "projection", "adapter"}
    assert {"query", "qkv", "projection"} <= moved


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "eva02_tiny_patch14_224"])
def test_matrices_take_part_where_timm_adds_biases_of_its_own(name):
    pytest.importorskip("peft")
    side = 28 if "patch14" in name else 32
    small = {"name": name, "embed_dim": 24, "depth": 1, "num_heads": 2}
    sizes = {"architecture": small, "patch_size": side // 2, "image_size": side}
    built = model(image=TIMM | sizes)
    plain = outputs(built)
    add_lora(built)
    torch.testing.assert_close(outputs(built), plain)
    built.image_encoder(torch.randn(2, 3, side, side)).sum().backward()
    last = {n: p.grad for n, p in built.image_encoder.named_parameters() if "lora_B" in n}
    assert last
    assert all(gradient is not None for gradient in last.values())


def test_attached_encodings_are_trained_beside_the_matrices():
    pytest.importorskip("peft")
    built = model(image=LORA | {"positions": {"irpe-product": {}}})
    add_lora(built)
    encodings = [p for n, p in built.image_encoder.named_parameters() if "positions." in n]
    assert encodings
    assert all(parameter.requires_grad for parameter in encodings)


def test_a_tower_without_known_layers_is_refused(monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.setattr(lora, "TARGETS", ["nothing"])
    with pytest.raises(ConfigError, match=r"image\.trainable lora-8: "):
        add_lora(model(image=LORA))


def test_missing_peft_is_named(monkeypatch):
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"text\.trainable lora-8 needs peft"):
        add_lora(model(text=LORA))
    add_lora(model())  # nothing is asked of it


def test_a_merged_convolution_is_pefts():
    peft = pytest.importorskip("peft")
    layer = torch.nn.Sequential()
    layer.add_module("qkv", torch.nn.Conv2d(3, 6, 2))
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, lora_alpha=4, target_modules=["qkv"], init_lora_weights=False), layer
    )
    image = torch.randn(1, 3, 5, 5)
    state = {f"image_encoder.{name}": value for name, value in layer.state_dict().items()}
    merged, _ = merge_lora(state, tiny_config(image={"trainable": "lora-2"}))
    weight, bias = (merged[f"image_encoder.qkv.{kind}"] for kind in ("weight", "bias"))
    torch.testing.assert_close(torch.nn.functional.conv2d(image, weight, bias), layer(image))
