"""Names registered with timm: options, features, weights, parameter counts of the papers."""

from __future__ import annotations

import pytest
import timm
import torch

import vlp.models.vision  # noqa: F401  # registers the names
from vlp.positions import PositionEncoding, list_positions
from vlp.positions.irpe import RelativePosition

DEIT = "vlp_deit_tiny_patch16_irpe_{}_224"
SWIN = "vlp_swin_tiny_patch4_window7_irpe_{}_224"
SMALL = "vlp_vit_small_patch4_{}_32"
VARIANTS = {
    "sine": "sine-2d",
    "rope_axial": "rope-axial",
    "rope_mixed": "rope-mixed",
    "cope": "cope",
    "sape_q": "sape",
    "sape_k": "sape",
    "sape_qk": "sape",
    "irpe_k": "irpe-product",
}
TINY = {"embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
TINY_DEIT = {**TINY, "img_size": 64}
TINY_SWIN = {
    "embed_dim": 16,
    "depths": (1, 2),
    "num_heads": (2, 2),
    "num_classes": 5,
    "img_size": 56,
}


def create(name, **options):
    return timm.create_model(name, **options).eval()


def filled(model):
    for module in model.modules():
        if isinstance(module, PositionEncoding):
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter)
    return model


def millions(name, **options):
    with torch.device("meta"):
        model = timm.create_model(name, **options)
    return round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 2)


def save(model, path):
    torch.save(model.state_dict(), path)
    return str(path)


def test_parameters_of_irpes_table_2():
    """In millions, 1000 classes: DeiT-S, contextual with own tables of each head, with shared."""
    assert millions("deit_small_patch16_224") == 22.05
    name = "vlp_deit_small_patch16_irpe_k_224"
    assert millions(name, position_options={"shared_heads": False}) == 22.28
    assert millions(name) == 22.09
    for shared in (False, True):
        bias = {"mode": "bias", "shared_heads": shared}
        assert millions(name, position_options=bias) == 22.05


@pytest.mark.parametrize("on", ["k", "qk", "qkv"])
@pytest.mark.parametrize(("name", "options"), [(DEIT, TINY_DEIT), (SWIN, TINY_SWIN)])
def test_irpe_has_the_papers_final_form(name, options, on):
    model = create(name.format(on), **options)
    positions = [part for part in model.modules() if isinstance(part, RelativePosition)]
    assert len(positions) == (3 if name is SWIN else 2)
    for position in positions:
        assert [role[0] for role in position.roles] == sorted(on, key="qkv".index)
        assert position.name == "irpe-product"
        assert position.mode == "contextual"
        for table in position.tables.values():
            assert table.shape[:2] == (1, 50)


def test_absolute_positions():
    shape = (1, 17, 16)
    assert create(DEIT.format("k"), **TINY_DEIT).pos_embed.shape == shape
    assert create(DEIT.format("k"), absolute="drop", **TINY_DEIT).pos_embed is None
    small = {**TINY, "img_size": 16}
    assert create(SMALL.format("irpe_k"), **small).pos_embed is None
    assert create(SMALL.format("irpe_k"), absolute="keep", **small).pos_embed.shape == shape
    assert create(SMALL.format("learned"), **small).pos_embed.shape == shape
    assert create(SMALL.format("none"), **small).pos_embed is None
    for absolute, count in (("keep", 3), ("drop", 0)):
        state = create(SWIN.format("k"), absolute=absolute, **TINY_SWIN).state_dict()
        assert sum("relative_position_bias_table" in name for name in state) == count
    for name in ("learned", "irpe_k"):
        with pytest.raises(ValueError, match="absolute is 'keep' or 'drop', not 'replace'"):
            create(SMALL.format(name), absolute="replace", **small)
    with pytest.raises(ValueError, match="no encoding to take position_options"):
        create(SMALL.format("none"), position_options={"ratio": 1.0})


@pytest.mark.parametrize("variant", ["none", "learned", *VARIANTS])
def test_small_models_train_and_run_on_larger_images(variant):
    name, encoding = SMALL.format(variant), VARIANTS.get(variant)
    if encoding is not None and encoding not in list_positions():
        with pytest.raises(ValueError, match=f"unknown position encoding '{encoding}'"):
            create(name)
        return
    model = create(name, dynamic_img_size=True, **TINY).train()
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    for parameter in model.parameters():
        assert parameter.grad.isfinite().all()
    places = [part for part in model.modules() if isinstance(part, PositionEncoding)]
    assert len(places) == {None: 0, "sine-2d": 1}.get(encoding, 2)
    assert model(torch.randn(1, 3, 48, 48)).isfinite().all()


def test_sapes_model_has_its_papers_sizes():
    with torch.device("meta"):
        model = timm.create_model(SMALL.format("none"))
    assert (model.embed_dim, len(model.blocks), model.blocks[0].attn.num_heads) == (384, 12, 6)
    assert model.patch_embed.grid_size == (8, 8)
    assert model.num_classes == 10


def test_features_of_a_vision_transformer():
    model = create(DEIT.format("qkv"), **TINY_DEIT)
    filled(model)
    features = create(DEIT.format("qkv"), **TINY_DEIT, features_only=True, out_indices=(0, 1))
    states = {name: x for name, x in model.state_dict().items() if not name.startswith("head")}
    missing, unexpected = features.model.load_state_dict(states, strict=False)
    assert missing == []
    assert unexpected == ["norm.weight", "norm.bias"]
    x = torch.randn(2, 3, 64, 64)
    expected = model.forward_intermediates(x, intermediates_only=True)
    torch.testing.assert_close(features(x), expected)
    assert features.feature_info.channels() == [16, 16]


@pytest.mark.parametrize(("name", "options"), [(DEIT, TINY_DEIT), (SWIN, TINY_SWIN)])
def test_checkpoints_of_ones_own(name, options, tmp_path):
    model = filled(create(name.format("qk"), **options))
    path = save(model, tmp_path / "model.pth")
    other = create(name.format("qk"), **options, checkpoint_path=path)
    x = torch.randn(2, 3, options["img_size"], options["img_size"])
    assert torch.equal(other(x), model(x))
    weights = {"pretrained": True, "pretrained_cfg_overlay": {"file": path, "num_classes": 5}}
    other = create(name.format("qk"), **options, **weights)
    assert torch.equal(other(x), model(x))


PUBLIC = [
    ("deit_tiny_patch16_224", DEIT, TINY_DEIT),
    ("swin_tiny_patch4_window7_224", SWIN, TINY_SWIN),
]


@pytest.mark.parametrize(("public", "name", "options"), PUBLIC)
def test_pretrained_weights_are_timms_with_encodings_at_zero(public, name, options, tmp_path):
    plain = create(public, **options)
    path = save(plain, tmp_path / "public.pth")
    weights = {"pretrained": True, "pretrained_cfg_overlay": {"file": path, "num_classes": 5}}
    model = create(name.format("qkv"), **options, **weights)
    x = torch.randn(2, 3, options["img_size"], options["img_size"])
    torch.testing.assert_close(model(x), plain(x), atol=1e-5, rtol=1e-5)
    finer = create(name.format("k"), **{**options, "num_classes": 3}, **weights)
    assert torch.equal(finer.patch_embed.proj.weight, plain.patch_embed.proj.weight)
    assert finer.num_classes == 3


@pytest.mark.parametrize(("public", "name", "options"), PUBLIC)
def test_pretrained_weights_without_the_models_own_positions(public, name, options, tmp_path):
    plain = create(public, **options)
    path = save(plain, tmp_path / "public.pth")
    weights = {"pretrained": True, "pretrained_cfg_overlay": {"file": path, "num_classes": 5}}
    model = create(name.format("k"), absolute="drop", **options, **weights)
    for own, weight in plain.named_parameters():
        if own.endswith(("pos_embed", "bias_table")):
            torch.nn.init.zeros_(weight)
    x = torch.randn(2, 3, options["img_size"], options["img_size"])
    torch.testing.assert_close(model(x), plain(x), atol=1e-5, rtol=1e-5)


def test_other_encodings_in_a_checkpoint_are_an_error(tmp_path):
    path = save(create(DEIT.format("qkv"), **TINY_DEIT), tmp_path / "model.pth")
    for classes in (5, 3):  # with other classes timm loads what fits
        with pytest.raises(ValueError, match=r"differ, .* blocks\.0\.attn\.positions\.0"):
            create(
                DEIT.format("k"),
                **{**TINY_DEIT, "num_classes": classes},
                pretrained=True,
                pretrained_cfg_overlay={"file": path, "num_classes": 5},
            )
