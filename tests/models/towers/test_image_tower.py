import json

import pytest
import timm
import torch
from safetensors.torch import save_file
from tests_support import tiny_text
from torch.nn import functional

import vlp
from vlp.config import ConfigError
from vlp.data.image.transforms import Preprocessing
from vlp.models.config import ImageConfig, ModelConfig
from vlp.models.folder import save_pretrained, start_from
from vlp.models.image_encoder import ImageEncoder
from vlp.models.pretrained.load import load_public_weights
from vlp.models.vlp import VLPModel

TINY = {"embed_dim": 32, "depth": 2, "num_heads": 2}
TOWERS = {
    "plain": ("vit_tiny_patch16_224", 16),
    "layer scale, registers": ("vit_small_patch14_reg4_dinov2", 14),
    "no class token": ("vit_base_patch16_siglip_224", 16),
    "normalised before the blocks": ("vit_base_patch16_clip_224", 16),
    "distillation token": ("deit_tiny_distilled_patch16_224", 16),
    "rotary": ("eva02_tiny_patch14_224", 14),
    "relative positions": ("beit_base_patch16_224", 16),
}
NAFLEX = "naflexvit_base_patch16_gap"
CLIP, PE = "vit_base_patch16_clip_224", "vit_pe_core_tiny_patch16_384"


def made(name, side, folder=None):
    """Timm's own model with numbers that differ everywhere, saved where a folder is given."""
    torch.manual_seed(3)
    vit = timm.create_model(name, pretrained=False, num_classes=0, img_size=side, **TINY).eval()
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if folder is not None:
        save_file(vit.state_dict(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"architecture": name}))
    return vit


def sizes(name, patch, squares=4, width=32, **image):
    image = {"architecture": TINY | {"name": name}, "patch_size": patch,
             "image_size": patch * squares, "width": width} | image  # fmt: skip
    return ModelConfig.model_validate(
        {
            "text": {"vocab_size": 50, "width": width, "layers": 1, "heads": 2, "intermediate": 64,
                     "max_positions": 20, "max_tokens": 12},
            "image": image,
            "cross": {"layers": 1, "heads": 2, "intermediate": 64},
            "embed_dim": 32,
        }
    )  # fmt: skip


@torch.no_grad()
def tokens(vit, pixels):
    states = vit.forward_features(pixels)
    if isinstance(vit.norm, torch.nn.Identity):
        states = vit.fc_norm(states)
    patches = states[:, vit.num_prefix_tokens :]
    has_cls = getattr(vit, "embeds", vit).cls_token is not None
    first = states[:, :1] if has_cls else patches.mean(1, keepdim=True)
    return torch.cat([first, patches], 1)


@pytest.mark.parametrize("pooling", ["cls", "mean", "cls+mean"])
@pytest.mark.parametrize(("name", "patch"), [*TOWERS.values(), (NAFLEX, 16)])
@torch.no_grad()
def test_pooled_layers_are_timms_blocks_before_the_last(name, patch, pooling, tmp_path):
    vit = made(name, 4 * patch, tmp_path)
    model = VLPModel(sizes(name, patch, weights=str(tmp_path), pooled_layers=2, pooling=pooling))
    (report,) = load_public_weights(model.eval())
    assert not report.resized
    assert all(key.startswith("attn_pool.") for key in report.unused)  # a head, which SigLIP has
    pixels = torch.randn(2, 3, 4 * patch, 4 * patch)
    whole = tokens(vit, pixels)
    vit.blocks = vit.blocks[:1]  # the one before the last is the last of this one
    pools = {
        "cls": lambda states: states[:, :1],
        "mean": lambda states: states[:, 1:].mean(1, keepdim=True),
        "cls+mean": lambda states: torch.cat([pools[p](states) for p in ("cls", "mean")], 1),
    }
    expected = pools[pooling](tokens(vit, pixels))
    encoder = model.image_encoder
    states = encoder(pixels)
    torch.testing.assert_close(states[:, 17:], expected, rtol=1e-5, atol=1e-5)
    last = encoder.drop_summary_tokens(states)
    assert last.shape == (2, 17, 32)
    torch.testing.assert_close(last, whole, rtol=1e-5, atol=1e-5)
    read = torch.cat([expected.flatten(1), pools[pooling](last).flatten(1)], 1)
    found = functional.normalize(encoder.projection(read), dim=-1)
    features = model.encode_image(pixels)
    torch.testing.assert_close(features.feature, found)
    assert torch.equal(features.states, last)
    # From the tower's stored output, pooled or not, and averaged with the flip's.
    assert torch.equal(model.encode_image(encoder.tower(pixels)).feature, features.feature)
    averaged = encoder.hflip_averaged_tower(pixels)
    flipped = encoder.hflip_averaged_tower(pixels.flip(-1))
    torch.testing.assert_close(averaged[:, 17:], flipped[:, 17:], rtol=1e-5, atol=1e-5)
    turned = flipped[:, 1:17].unflatten(1, (4, 4)).flip(2).flatten(1, 2)
    torch.testing.assert_close(averaged[:, 1:17], turned, rtol=1e-5, atol=1e-5)


def test_towers_of_eva_without_prefix_tokens_pool_layers():
    name = "eva02_tiny_patch14_224"
    tower = TINY | {"name": name, "class_token": False, "global_pool": "avg"}
    config = sizes(name, 14, pooled_layers=2, pooling="mean", architecture=tower)
    with torch.no_grad():
        states = VLPModel(config).eval().image_encoder(torch.randn(2, 3, 56, 56))
    assert states.shape == (2, 1 + 16 + 1, 32)


def test_pooled_layers_survive_the_pooling_of_patches():
    config = sizes("vit_small_patch14_reg4_dinov2", 14, pool=2, pooled_layers=2, pooling="cls+mean")
    model = VLPModel(config).eval()
    with torch.no_grad():
        stored = model.image_encoder.tower(torch.randn(2, 3, 56, 56))
        once = model.image_encoder.pool_patches(stored)
        assert stored.shape[1] == 1 + 16 + 2
        assert once.shape[1] == 1 + 4 + 2
        assert torch.equal(once[:, 5:], stored[:, 17:])
        assert torch.equal(model.image_encoder.pool_patches(once), once)
        assert model.encode_image(stored).tokens.shape[1] == 4


@pytest.mark.parametrize(("name", "patch"), TOWERS.values(), ids=TOWERS)
@torch.no_grad()
def test_a_tower_with_encodings_starts_as_it_was_and_keeps_its_folder(name, patch, tmp_path):
    """Tables of zeros, beside weights that know nothing of them."""
    vit = made(name, 4 * patch, tmp_path)
    positions = {"irpe-product": {"roles": "qk"}}
    config = sizes(name, patch, weights=str(tmp_path), positions=positions)
    model = VLPModel(config).eval()
    (report,) = load_public_weights(model)
    assert "vit.blocks.*.attn.positions" in report.missing
    pixels = torch.randn(2, 3, 4 * patch, 4 * patch)
    before = model.image_encoder(pixels)
    assert torch.allclose(before, tokens(vit, pixels), atol=1e-5)
    for key, table in model.image_encoder.named_parameters():
        if ".positions." in key:
            table.normal_()
    after = model.image_encoder(pixels)
    assert not torch.allclose(after, before, atol=1e-3)
    again = VLPModel(ModelConfig.model_validate(config.model_dump(mode="json"))).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.image_encoder(pixels), after)


def test_encodings_that_do_not_fit_a_tower_are_named():
    with pytest.raises(ConfigError, match=r"image.positions: .*no option 'depth'"):
        ImageEncoder(ImageConfig(layers=1, positions={"sape": {"depth": 1}}), 8)


@pytest.mark.parametrize("name", ["vit_small_patch14_reg4_dinov2", "eva02_tiny_patch14_224"])
@torch.no_grad()
def test_positions_are_resampled_as_timm_does(name, tmp_path):
    made(name, 6 * 14, tmp_path)
    source = {"file": str(tmp_path / "model.safetensors"), "num_classes": 0}
    theirs = timm.create_model(
        name, pretrained=True, num_classes=0, img_size=56, pretrained_cfg_overlay=source, **TINY
    ).eval()
    model = VLPModel(sizes(name, 14, weights=str(tmp_path))).eval()
    (report,) = load_public_weights(model)
    assert report.resized == ["vit.pos_embed"]
    pixels = torch.randn(2, 3, 56, 56)
    assert torch.allclose(model.image_encoder(pixels), tokens(theirs, pixels), atol=1e-5)


@torch.no_grad()
def test_pooled_patches_are_means_of_squares_and_another_width_is_adapted():
    config = sizes("vit_tiny_patch16_224", 16, squares=6, width=48, pool=3).image
    encoder = ImageEncoder(config, 8).eval()
    assert (config.grid, config.tower_grid) == ((2, 2), (6, 6))
    states = encoder.tower(pixels := torch.randn(2, 3, 96, 96))
    assert states.shape == (2, 37, 32)
    grid = states[:, 1:].reshape(2, 6, 6, 32)
    rows = [states[:, 0]]
    rows += [grid[:, r : r + 3, c : c + 3].mean((1, 2)) for r in (0, 3) for c in (0, 3)]
    expected = encoder.adapter(torch.stack(rows, 1))
    assert torch.allclose(encoder(pixels), expected, atol=1e-6)
    # A stored output takes the place of pixels, and half precision is widened.
    assert torch.equal(encoder(states), encoder(pixels))
    assert torch.equal(encoder(encoder.pool_patches(states)), encoder(pixels))
    assert encoder(states.half()).dtype == torch.float32
    with pytest.raises(ValueError, match="stored tower outputs"):
        encoder(states, lambda patches: patches)


@pytest.mark.parametrize("positions", [{}, {"alibi-2d": {}}])
@torch.no_grad()
def test_model_folder_needs_no_public_weights_and_starts_another_size(positions, tmp_path):
    name = "vit_small_patch14_reg4_dinov2"
    config = sizes(name, 14, weights="nowhere", positions=positions)
    model = VLPModel(config).eval()
    preprocess = Preprocessing(56, *config.image.statistics)
    save_pretrained(tmp_path, config, model.state_dict(), tiny_text(), preprocess)
    loaded = vlp.load(tmp_path)
    pixels = torch.randn(1, 3, 56, 56)
    assert torch.equal(loaded.model.encode_image(pixels).states, model.encode_image(pixels).states)
    assert loaded.preprocess.mean == (0.485, 0.456, 0.406)
    larger = VLPModel(sizes(name, 14, squares=6, positions=positions)).eval()
    report = start_from(larger, tmp_path)
    assert report.resized == ["image_encoder.vit.pos_embed"]
    assert larger.encode_image(torch.randn(1, 3, 84, 84)).states.shape == (1, 37, 32)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ({"pooled_layers": 3}, "pooled_layers 3: vit_small_patch14_dinov2 has 2 blocks"),
        ({"patch_size": 16, "image_size": 224}, r"set image\.patch_size=14"),
        ({"architecture": "swin_tiny_patch4_window7_224"}, "one grid"),
        ({"architecture": NAFLEX, "patch_size": 16, "positions": {"sape": {}}}, "NaFlexVit is not"),
        ({"architecture": "resnet18"}, "timm cannot create it"),
        ({"architecture": "vit_of_nobody"}, "timm cannot create it"),
        ({"architecture": {"name": "vit_small_patch14_dinov2", "no_such": 1}}, "no_such"),
    ],
)
def test_unfit_towers_are_refused_in_a_sentence(image, message):
    with pytest.raises(ConfigError, match=message):
        VLPModel(sizes("vit_small_patch14_dinov2", 14, **{"image_size": 224, **image}))


def test_weights_of_another_tower_are_refused(tmp_path):
    made("vit_small_patch14_dinov2", 56, tmp_path)
    model = VLPModel(sizes("vit_small_patch14_reg4_dinov2", 14, weights=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"image\.weights: .*reg_token"):
        load_public_weights(model)


@pytest.mark.parametrize(
    ("there", "here", "options", "message"),
    [
        ("vit_base_patch16_clip_quickgelu_224", CLIP, {}, r"mlp\.act is QuickGELU"),
        (CLIP, CLIP, {"num_heads": 4}, "num_heads is 4 there and 2 here"),
        (CLIP, CLIP, {}, None),
        (PE, PE, {"rope_grid_indexing": "ij"}, "rope.grid_indexing is ij there and xy here"),
        (PE, PE, {"ref_feat_shape": [4, 4]}, r"rope.ref_feat_shape is \(4, 4\) there"),
        (PE, PE, {"use_rot_pos_emb": False}, "rope is missing there"),
    ],
)
def test_settings_that_no_shape_tells_are_compared(there, here, options, message, tmp_path):
    args = TINY | {"img_size": 32} | options
    vit = timm.create_model(there, num_classes=0, **args)
    save_file(vit.state_dict(), tmp_path / "model.safetensors")
    config = {"architecture": there, "model_args": args, "pretrained_cfg": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = VLPModel(sizes(here, 16, 2, weights=str(tmp_path)))
    if message is None:
        (report,) = load_public_weights(model)
        assert not report.notes
    else:
        with pytest.raises(ConfigError, match=rf"image\.weights: .*{message}"):
            load_public_weights(model)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ({"pool": 3}, "pool 3 does not divide"),
        ({"architecture": {"depth": 1}}, "key `name`"),
        ({"pooled_layers": 2}, "pooled_layers above 1 needs a tower: name it in architecture"),
    ],
)
def test_impossible_configurations_are_refused(image, message):
    with pytest.raises(ValueError, match=message):
        ImageConfig(image_size=64, patch_size=16, **image)
    config = sizes("vit_tiny_patch16_224", 16, pooled_layers=2).model_dump()
    with pytest.raises(ValueError, match="pooled_layers needs token_projection"):
        ModelConfig.model_validate(config | {"token_projection": False})
