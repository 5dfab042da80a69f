import json

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from transformers import DeiTConfig, DeiTModel, ViTConfig, ViTImageProcessor, ViTModel

from vlp.config import ConfigError
from vlp.models.config import ModelConfig
from vlp.models.pretrained.load import load_public_weights, load_vit
from vlp.models.pretrained.published import timm_names
from vlp.models.vlp import VLPModel

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
TRUSTED = "the source does not state its heads: assuming 3"


def random_vit(name, **options):
    """Norms and biases are random too: at timm's start they are all ones and zeros."""
    torch.manual_seed(3)
    vit = timm.create_model(name, pretrained=False, **options).eval()
    with torch.no_grad():
        for key, parameter in vit.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(std=0.1).add_("norm" in key and key.endswith("weight"))
    return vit


def sizes(name, width=192, **image):
    image = {"image_size": 224, "width": width, "heads": width // 64, "intermediate": 4 * width,
             "layers": 12, "weights": name} | image  # fmt: skip
    return ModelConfig.model_validate(
        {
            "text": {"vocab_size": 50, "width": width, "layers": 1, "heads": 3, "intermediate": 64,
                     "max_positions": 20, "max_tokens": 12},
            "image": image,
            "cross": {"layers": 1, "heads": 3, "intermediate": 64},
        }
    )  # fmt: skip


def loaded(name, width=192, **image):
    model = VLPModel(sizes(str(name), width, **image)).eval()
    (report,) = load_public_weights(model)
    return model.image_encoder, report


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    vit, folder = random_vit("vit_tiny_patch16_224"), tmp_path_factory.mktemp("timm") / "vit"
    save_for_hf(vit, folder, safe_serialization=True)
    return vit, folder


@pytest.fixture
def folder(tiny, tmp_path):
    """A folder of its own, whose configuration may be edited: `edit(key=value)`."""
    save_file(load_file(tiny[1] / "model.safetensors"), tmp_path / "model.safetensors")
    config = json.loads((tiny[1] / "config.json").read_text())

    def edit(**changes):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        return tmp_path

    return edit


def as_file(vit, folder):
    save_file(vit.state_dict(), folder / "vit.safetensors")
    return folder / "vit.safetensors"


def as_pth(vit, folder):
    torch.save({"model": vit.state_dict()}, folder / "deit.pth")
    return folder / "deit.pth"


def as_folder(vit, folder):
    save_for_hf(vit, folder)
    return folder


def as_flat_folder(vit, folder):
    """A folder of another tool, with keys of its own beside the architecture."""
    save_file(vit.state_dict(), folder / "model.safetensors")
    cfg = {"architecture": "deit_tiny_patch16_224", "patch_size": 16, "mean": MEAN, "std": STD}
    (folder / "config.json").write_text(json.dumps(cfg))
    return folder


def as_hub_name(vit, folder):
    repository = folder / "models--acme--vit"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    save_for_hf(vit, snapshot, safe_serialization=True)
    return "acme/vit"


@torch.no_grad()
@pytest.mark.parametrize(
    ("form", "classes"),
    [
        (as_file, 0),
        (as_pth, 1000),
        (as_folder, 1000),
        (as_flat_folder, 0),
        (as_hub_name, 1000),
    ],
)
def test_every_source_gives_timm_s_own_features(tmp_path, monkeypatch, form, classes):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    name = "deit_tiny_patch16_224"
    vit = random_vit(name, num_classes=classes)
    source = form(vit, tmp_path)
    encoder, report = loaded(source, image_size=384, layers=2, normalisation=[MEAN, STD])
    file = tmp_path / "reference.safetensors"
    save_file(vit.state_dict(), file)
    # Timm reads the file and resamples the positions itself.
    options = {"pretrained_cfg_overlay": {"file": str(file)}, "num_classes": classes}
    reference = timm.create_model(name, pretrained=True, img_size=384, **options).eval()
    reference.blocks = reference.blocks[:2]
    pixels = torch.randn(1, 3, 384, 384)
    theirs = reference.forward_features(pixels)
    torch.testing.assert_close(encoder(pixels), theirs, rtol=1e-5, atol=1e-5)
    assert report.resized == ["vit.pos_embed"]
    assert len(report.matched) == 5 + 2 * 12
    assert len(report.unused) == 10 * 12 + (2 if classes else 0)
    assert report.notes == ((TRUSTED,) if form in (as_file, as_pth) else ())


def test_bfloat16_positions_are_resampled_in_float32(tiny, tmp_path):
    state = {key: tensor.bfloat16() for key, tensor in tiny[0].state_dict().items()}
    save_file(state, tmp_path / "vit.safetensors")
    encoder, report = loaded(tmp_path / "vit.safetensors", image_size=384, layers=1)
    assert report.notes[0] == "bfloat16 there, float32 here"
    places = encoder.vit.pos_embed
    assert not torch.equal(places, places.bfloat16().float())
    assert torch.equal(encoder.vit.cls_token, state["cls_token"].float())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_args": {"act_layer": "gelu_tanh"}}, r"activation is GELUTanh\(\) there and GELU"),
        ({"model_args": {"global_pool": "avg", "fc_norm": False}}, "set image.pooling=mean"),
        ({"architecture": "mixer_s32_224", "model_args": {}}, "is a MlpMixer, not a vision trans"),
        ({"architecture": "vit_of_mine"}, "timm cannot create a model from it .*vit_of_mine"),
    ],
)
def test_another_function_with_the_same_names_is_refused(folder, changes, message):
    with pytest.raises(ConfigError, match=message):
        loaded(folder(**changes))


def test_pixels_are_normalised_as_the_weights_expect(folder, tmp_path_factory):
    changed = folder(pretrained_cfg={"mean": MEAN, "std": STD})
    other = tmp_path_factory.mktemp("transformers")
    ViTModel(ViTConfig(**SIZES, num_hidden_layers=1)).save_pretrained(other)
    ViTImageProcessor(image_mean=MEAN, image_std=STD).save_pretrained(other)
    for weights in (changed, other):
        with pytest.raises(ConfigError, match=r"set image.normalisation=\[\[0.485,0.456,0.406\],"):
            loaded(weights, layers=1)


def test_pixels_that_are_not_normalised_have_no_statistics(tmp_path):
    ViTModel(ViTConfig(**SIZES, num_hidden_layers=1)).save_pretrained(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    for settings in ({"do_normalize": False, "image_mean": MEAN, "image_std": STD}, {}):
        file.write_text(json.dumps(settings))
        loaded(tmp_path, layers=1)
    file.write_text(json.dumps({"image_mean": 0.4, "image_std": 0.5}))
    with pytest.raises(ConfigError, match=r"set image.normalisation=\[\[0.4,0.4,0.4\],\[0.5"):
        loaded(tmp_path, layers=1)


def test_the_classes_of_a_folder_hide_no_other_settings(tmp_path):
    save_for_hf(random_vit("vit_tiny_patch16_224", num_classes=10), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_args": None}))
    with pytest.raises(ConfigError, match=r"set image\.heads=3"):
        loaded(tmp_path, heads=6)


def test_averaged_weights_that_are_not_read_are_named(tiny, tmp_path, caplog):
    state = tiny[0].state_dict()
    torch.save({"model": state, "model_ema": state}, tmp_path / "deit.pth")
    loaded(tmp_path / "deit.pth", layers=1)
    assert "the averaged weights in model_ema are not read" in caplog.text


def test_what_a_folder_lacks_is_named(folder, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config.json: names neither a timm architecture nor"):
        loaded(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json: not valid JSON"):
        loaded(tmp_path)
    edited = folder()
    (edited / "model.safetensors").write_bytes(b"hello")
    with pytest.raises(ConfigError, match=r"model.safetensors: damaged"):
        loaded(edited)
    (edited / "model.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"image.weights: .*has no model.safetensors or pytorch_model.bin"
    ):
        loaded(edited)


def test_names_that_are_nowhere(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name, message in (
        (
            "acme/none",
            "cannot load acme/none: it is no local folder, and cannot be read from the hub",
        ),
        ("vit_of_mine", "neither a file, a folder, a hub name .* nor a model of timm"),
        ("vit_tiny_patch16_224", "cannot load vit_tiny_patch16_224: "),
        ("./none", "there is no such folder"),
    ):
        with pytest.raises(FileNotFoundError, match=f"^image.weights: .*{message}"):
            loaded(name)


def test_too_few_blocks_and_unknown_keys(tiny, tmp_path):
    with pytest.raises(ConfigError, match=r"has 12 blocks, image.layers needs 13"):
        loaded(tiny[1], layers=13)
    file = tmp_path / "deit3.safetensors"
    state = tiny[0].state_dict() | {"blocks.0.ls1.gamma": torch.ones(192)}
    save_file(state, file)
    with pytest.raises(ConfigError, match=r"keys of a ViT: blocks.0.ls1.gamma$"):
        loaded(file)


def test_positions_without_a_square_grid_and_other_widths_are_named(tiny):
    state = dict(tiny[0].state_dict())
    with pytest.raises(ValueError, match=r"vit: positions \(1, 13, 192\) are not"):
        load_vit(VLPModel(sizes(None)), state | {"pos_embed": torch.zeros(1, 13, 192)}, "vit")
    with pytest.raises(ValueError, match=r"vit.cls_token is \(1, 1, 64\) there and \(1, 1, 192\)"):
        load_vit(VLPModel(sizes(None)), state | {"cls_token": torch.zeros(1, 1, 64)}, "vit")
    with pytest.raises(ValueError, match=r"vit.norm.bias has values that are not finite"):
        load_vit(VLPModel(sizes(None)), state | {"norm.bias": torch.full((192,), torch.nan)}, "vit")
    with pytest.raises(FileNotFoundError, match=r"image.weights: there is no file .*none.pth"):
        loaded("/nowhere/none.pth", layers=1)


SIZES = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "image_size": 64}


@torch.no_grad()
@pytest.mark.parametrize(("epsilon", "noted"), [(1e-6, False), (1e-12, True)])
def test_a_folder_of_transformers(tmp_path, epsilon, noted):
    torch.manual_seed(5)
    vit = ViTModel(ViTConfig(**SIZES, num_hidden_layers=2, layer_norm_eps=epsilon)).eval()
    for parameter in vit.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)
    vit.save_pretrained(tmp_path)
    encoder, report = loaded(tmp_path, image_size=64, layers=2)
    pixels = torch.randn(2, 3, 64, 64)
    # Of faint random patches another epsilon is seen, which is why it is noted.
    close = 1e-3 if noted else 1e-5
    theirs = vit(pixels).last_hidden_state
    torch.testing.assert_close(encoder(pixels), theirs, rtol=close, atol=close)
    note = "norms add 1e-12 to the variance there, 1e-06 here"
    assert report.notes == ((note,) if noted else ())
    with pytest.raises(ConfigError, match=r"has 3 heads and image.heads is 6"):
        loaded(tmp_path, image_size=64, layers=2, heads=6)


def test_a_distilled_folder_of_transformers(tmp_path):
    deit = DeiTModel(DeiTConfig(**SIZES, num_hidden_layers=1))
    torch.nn.init.normal_(deit.embeddings.position_embeddings)
    deit.save_pretrained(tmp_path)
    encoder, report = loaded(tmp_path, image_size=64, layers=1)
    theirs = deit.embeddings.position_embeddings
    assert torch.equal(encoder.vit.pos_embed[:, 0], theirs[:, 0])
    assert torch.equal(encoder.vit.pos_embed[:, 1:], theirs[:, 2:])
    assert "dist_token" in report.unused
    assert report.notes[0] == "the distillation token and its position are left out"


def test_keys_that_do_not_fit_are_named():
    layer = "vit.encoder.layer.0.attention.attention"
    with pytest.raises(ValueError, match=r"hub/vit: no rule maps these keys of a ViT: vit.extra"):
        timm_names({"vit.extra": torch.zeros(1)}, "hub/vit")
    with pytest.raises(ValueError, match=r"hub/vit: blocks.0.attn.qkv.weight lacks its key and"):
        timm_names({f"{layer}.query.weight": torch.zeros(2, 2)}, "hub/vit")
