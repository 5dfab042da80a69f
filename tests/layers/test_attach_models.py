import copy
import pickle

import pytest
import timm
import torch
import transformers
from timm.models import create_feature_extractor
from torch import nn

from vlp.positions import PositionEncoding, attach, drop_absolute

VIT = {"embed_dim": 32, "depth": 2, "num_heads": 2}
PRETRAINED = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": 64,
    "patch_size": 16,
}
SWIN = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
MODELS = {
    "vit_small_patch16_224": VIT,
    "deit_small_patch16_224": VIT,
    "deit_small_distilled_patch16_224": VIT,
    "deit3_small_patch16_224": VIT,
    "vit_small_patch14_dinov2": VIT | {"patch_size": 16},
    "vit_small_patch14_reg4_dinov2": VIT | {"patch_size": 16},
    "vit_base_patch16_clip_224": VIT,
    "vit_base_patch16_siglip_224": VIT,
    "flexivit_small": VIT,
    "swin_tiny_patch4_window7_224": SWIN,
    "swinv2_tiny_window8_256": SWIN,
    "eva02_tiny_patch14_224": VIT | {"patch_size": 16},
    "eva_giant_patch14_224": VIT | {"patch_size": 16},
    "vit_small_patch16_dinov3": VIT,
    "vit_pe_core_tiny_patch16_384": VIT,
    "vit_small_patch16_rope_mixed_224": VIT,
    "beit_base_patch16_224": VIT,
    "beitv2_base_patch16_224": VIT,
    "vit_relpos_small_patch16_224": VIT,
    "ViTModel": transformers.ViTConfig(**PRETRAINED),
    "Dinov2Model": transformers.Dinov2Config(**PRETRAINED),
    "Dinov2WithRegistersModel": transformers.Dinov2WithRegistersConfig(**PRETRAINED),
    "SiglipVisionModel": transformers.SiglipVisionConfig(**PRETRAINED),
    "Siglip2VisionModel": transformers.Siglip2VisionConfig(**PRETRAINED, num_patches=16),
    "CLIPVisionModel": transformers.CLIPVisionConfig(**PRETRAINED),
    "xcit_nano_12_p16_224": {"depth": 2},
    "cait_xxs24_224": {"depth": 2},
}
IMPOSSIBLE = {
    "xcit_nano_12_p16_224": "attends between channels, not between positions",
    "cait_xxs24_224": "mixes the logits of its heads",
}
WATCHED = ["eva02_tiny_patch14_224", "beit_base_patch16_224", "vit_relpos_small_patch16_224"]
POSSIBLE = [name for name in MODELS if name not in IMPOSSIBLE]
BEYOND = {
    "DINOv3ViTModel": transformers.DINOv3ViTConfig(**PRETRAINED),
    "BeitModel": transformers.BeitConfig(**PRETRAINED, use_relative_position_bias=True),
    "DeiTModel": transformers.DeiTConfig(**PRETRAINED),
}


def make(name):
    torch.manual_seed(0)
    options = (MODELS | BEYOND)[name]
    if not isinstance(options, dict):
        return fill(getattr(transformers, name)(options).eval())
    return fill(timm.create_model(name, num_classes=5, img_size=64, **options).eval())


def fill(model):
    """Weights that are small, or zero, would hide what is behind them."""
    for key, parameter in model.named_parameters():
        if "gamma" in key or "lambda" in key or ("norm" in key and key.endswith("weight")):
            nn.init.ones_(parameter)
        elif "norm" not in key:
            nn.init.normal_(parameter, std=0.2)
    return model


def inputs(name, height=64, width=64, batch=2):
    torch.manual_seed(1)
    images = torch.randn(batch, 3, height, width)
    if name != "Siglip2VisionModel":
        return {"pixel_values": images} if name[0].isupper() else {"x": images}
    rows, columns = height // 16, width // 16
    patches = nn.functional.unfold(images, 16, stride=16).transpose(1, 2)
    return {
        "pixel_values": patches,
        "pixel_attention_mask": torch.ones(batch, rows * columns, dtype=torch.long),
        "spatial_shapes": torch.tensor([[rows, columns]] * batch),
    }


def output(model, name, **sizes):
    given = inputs(name, **sizes)
    if name[0].isupper():
        return model(**given).last_hidden_state
    return model(given["x"])


def encodings(model):
    return [part for part in model.modules() if isinstance(part, PositionEncoding)]


class Recorder(PositionEncoding):
    def __init__(self):
        super().__init__()
        self.contexts = []

    def bias(self, query, key, context):
        assert query.shape == key.shape
        self.contexts.append((context, query.shape[-2]))


class Shift(PositionEncoding):
    def __init__(self, width):
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(width))

    def tokens(self, x, context):
        prefix = x[:, : context.prefix_tokens]
        return torch.cat([prefix, x[:, context.prefix_tokens :] + self.vector], 1)


@pytest.mark.parametrize("name", [*POSSIBLE, *BEYOND])
def test_a_table_of_zeros_changes_nothing_and_gets_gradients(name):
    model = make(name)
    before = output(model, name)
    names = {key: value.clone() for key, value in model.state_dict().items()}
    assert attach(model, "irpe-product", on="qkv") is model
    torch.testing.assert_close(output(model, name), before, atol=1e-5, rtol=0)
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in names.items())
    output(model, name).square().mean().backward()
    found = encodings(model)
    assert len(found) >= 2
    moved = [table.grad.abs().max() > 0 for one in found for table in one.tables.values()]
    assert sum(moved) > len(moved) / 2  # behind the last layer's [CLS] some stay without
    for one in found:
        for table in one.tables.values():
            nn.init.normal_(table)
    assert not torch.allclose(output(model, name), before, atol=1e-3)


@pytest.mark.parametrize("name", [*POSSIBLE, *BEYOND])
def test_every_layer_knows_its_grid(name):
    model = attach(make(name), Recorder)
    output(model, name)
    for one in encodings(model):
        ((context, tokens),) = one.contexts
        assert tokens == context.prefix_tokens + context.grid[0] * context.grid[1]
    if "swin" not in name:
        prefix = {"distilled": 2, "DeiT": 2, "reg4": 5, "dinov3": 5, "WithRegisters": 5}
        prefix |= {"siglip": 0, "Siglip": 0, "relpos": 0}
        expected = next((count for part, count in prefix.items() if part in name), 1)
        assert context.grid == (4, 4)
        assert context.prefix_tokens == expected


@pytest.mark.parametrize("name", [*POSSIBLE, *BEYOND])
def test_tokens_get_their_encoding_once(name):
    model = make(name)
    before = output(model, name)
    attach(model, Shift)
    torch.testing.assert_close(output(model, name), before, atol=1e-5, rtol=0)
    (one,) = encodings(model)
    nn.init.normal_(one.vector)
    assert not torch.allclose(output(model, name), before, atol=1e-3)
    output(model, name).square().mean().backward()
    assert one.vector.grad.abs().max() > 0


@pytest.mark.parametrize("name", [*POSSIBLE, *BEYOND])
def test_own_positions_dropped_leave_patches_without_places(name):
    """Patches that change places: without any position the states change places with them."""
    model = make(name)
    before = {key: value.clone() for key, value in model.named_parameters()}
    after = dict(drop_absolute(model).named_parameters())
    gone = {
        key for key, value in before.items() if not torch.equal(after.get(key, value * 0), value)
    }
    parts = ("pos", "bias_table", "cpb_mlp", "rope")
    assert all(any(part in key for part in parts) for key in gone), gone
    assert gone or "dinov3" in name.lower()  # which turns by buffers alone
    if "swin" in name:
        assert output(model, name).isfinite().all()
        return
    given = inputs(name)
    key = next(iter(given))
    images = given[key]
    if name == "Siglip2VisionModel":
        given[key] = images.flip(1)
    else:
        given[key] = images.unflatten(-1, (4, 16)).flip(-2).flatten(-2)
    if name[0].isupper():
        plain, turned = (model(**x).last_hidden_state.mean(1) for x in (inputs(name), given))
    else:
        plain, turned = model(images), model(given[key])
    torch.testing.assert_close(plain, turned, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["ViTModel", "Dinov2Model", "Dinov2WithRegistersModel", "CLIPVisionModel",
             "SiglipVisionModel", "Siglip2VisionModel", "DINOv3ViTModel",
             "eva02_tiny_patch14_224"],
)  # fmt: skip
def test_other_grids(name):
    model = make(name)
    if name.startswith("eva"):
        model = timm.create_model(
            name, num_classes=5, img_size=64, dynamic_img_size=True, **MODELS[name]
        ).eval()
    given = inputs(name, 96, 48)
    if name in ("ViTModel", "CLIPVisionModel", "SiglipVisionModel"):
        given["interpolate_pos_encoding"] = True

    def run():
        return model(**given).last_hidden_state if name[0].isupper() else model(given["x"])

    before = run()
    attach(model, "irpe-product")
    torch.testing.assert_close(run(), before, atol=1e-5, rtol=0)
    attach(model, Recorder)
    run()
    recorder = next(one for one in encodings(model) if isinstance(one, Recorder))
    assert recorder.contexts[-1][0].grid == (6, 3)


@pytest.mark.parametrize("name", WATCHED)
def test_other_patch_sizes(name):
    model = attach(make(name), Recorder)
    recorder = encodings(model)[0]
    for sizes in ({"img_size": (16, 64), "patch_size": 8}, {"img_size": (32, 64)}):
        model.set_input_size(**sizes)  # first to as many patches as before
        model(inputs(name, *sizes["img_size"])["x"])
    assert [context.grid for context, _ in recorder.contexts] == [(2, 8), (4, 8)]


@pytest.mark.parametrize(
    "name", ["eva02_tiny_patch14_224", pytest.param("Dinov2Model", marks=pytest.mark.nightly)]
)
def test_copies_pickles_and_compilation_keep_the_encoding(name):
    model = make(name)
    attach(attach(model, "irpe-product", on="qk"), Shift)
    for one in encodings(model):
        for parameter in one.parameters():
            nn.init.normal_(parameter, std=0.3)
    expected = output(model, name)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(output(other, name), expected)
        nn.init.zeros_(next(iter(encodings(other)[0].parameters())))
    torch.testing.assert_close(output(model, name), expected)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(output(compiled, name), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", WATCHED)
def test_feature_extraction_and_export_go_on(name):
    model = attach(attach(make(name), "irpe-product", on="qk"), Shift)
    for one in encodings(model):
        for parameter in one.parameters():
            nn.init.normal_(parameter, std=0.3)
    x, taken = inputs(name)["x"], []
    with model.blocks[0].register_forward_hook(lambda _, __, out: taken.append(out)):
        expected = model(x)
    found = create_feature_extractor(model, {"blocks.0": "out"})(x)["out"]
    torch.testing.assert_close(found, taken[0])
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), expected, atol=1e-5, rtol=1e-5)


def test_other_models_say_why():
    for name, reason in IMPOSSIBLE.items():
        with pytest.raises(ValueError, match=reason):
            attach(make(name), "irpe-product")
    with pytest.raises(ValueError, match="ResNet has no layer of attention"):
        attach(timm.create_model("resnet18"), "irpe-product")
    config = transformers.CLIPConfig(
        text_config={**PRETRAINED, "vocab_size": 50}, vision_config=PRETRAINED
    )
    model = transformers.CLIPModel(config)
    with pytest.raises(ValueError, match="CLIPModel has a text encoder, too; attach to its vision"):
        attach(model, "irpe-product")
    attach(model.vision_model, "irpe-product")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = transformers.BertModel(transformers.BertConfig(**sizes))
    with pytest.raises(
        ValueError, match="BertModel of transformers: it needs exactly one embedding"
    ):
        attach(text, "irpe-product")
    # Its layers do not read their attention function from the configuration.
    image = transformers.Data2VecVisionModel(transformers.Data2VecVisionConfig(**PRETRAINED))
    with pytest.raises(ValueError, match="needs attention layers of"):
        attach(image, "irpe-product")
