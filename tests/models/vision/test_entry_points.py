import copy

import pytest
import timm
import torch

import vlp.models.vision  # noqa: F401  # registers the names
from vlp.models.vision.published_irpe import from_published, load_published_irpe
from vlp.positions import PositionEncoding, attach
from vlp.positions.irpe import RelativePosition

DEIT = "vlp_deit_tiny_patch16_irpe_{}_224"
SWIN = "vlp_swin_tiny_patch4_window7_irpe_{}_224"
SMALL = "vlp_vit_small_patch4_{}_32"
ENCODINGS = ("sine", "rope_axial", "rope_mixed", "cope", "sape_q", "sape_k", "sape_qk", "irpe_k")
TINY = {"embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
TINY_DEIT = {**TINY, "img_size": 64}
TINY_SWIN = {**TINY_DEIT, "depths": (1, 2), "num_heads": (2, 2), "img_size": 56}
TINY_SWIN.pop("depth")


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


@pytest.mark.parametrize("variant", ["none", "learned", *ENCODINGS])
def test_small_models_train_and_run_on_larger_images(variant):
    model = create(SMALL.format(variant), dynamic_img_size=True, **TINY).train()
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    for parameter in model.parameters():
        assert parameter.grad.isfinite().all()
    places = [part for part in model.modules() if isinstance(part, PositionEncoding)]
    assert len(places) == {"none": 0, "learned": 0, "sine": 1}.get(variant, 2)
    assert model(torch.randn(1, 3, 48, 48)).isfinite().all()


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


PUBLIC = [
    ("deit_tiny_patch16_224", DEIT, TINY_DEIT),
    ("swin_tiny_patch4_window7_224", SWIN, TINY_SWIN),
]


def pretrained(model, folder):
    """Options of `timm.create_model` with the weights of a model of 5 classes."""
    torch.save(model.state_dict(), path := folder / "model.pth")
    overlay = {"file": str(path), "num_classes": 5}
    return {"pretrained": True, "pretrained_cfg_overlay": overlay}


@pytest.mark.parametrize(("public", "name", "options"), PUBLIC)
def test_checkpoints_and_public_weights_are_loaded(public, name, options, tmp_path):
    x = torch.randn(2, 3, options["img_size"], options["img_size"])
    model = filled(create(name.format("qk"), **options))
    weights = pretrained(model, tmp_path)
    assert torch.equal(create(name.format("qk"), **options, **weights)(x), model(x))
    path = weights["pretrained_cfg_overlay"]["file"]
    assert torch.equal(create(name.format("qk"), **options, checkpoint_path=path)(x), model(x))

    plain = create(public, **options)
    weights = pretrained(plain, tmp_path)
    model = create(name.format("qkv"), **options, **weights)
    torch.testing.assert_close(model(x), plain(x), atol=1e-5, rtol=1e-5)
    finer = create(name.format("k"), **{**options, "num_classes": 3}, **weights)
    assert torch.equal(finer.patch_embed.proj.weight, plain.patch_embed.proj.weight)
    assert finer.num_classes == 3
    # Without the absolute positions of the model.
    model = create(name.format("k"), absolute="drop", **options, **weights)
    for key, weight in plain.named_parameters():
        if key.endswith(("pos_embed", "bias_table")):
            torch.nn.init.zeros_(weight)
    torch.testing.assert_close(model(x), plain(x), atol=1e-5, rtol=1e-5)


def test_other_encodings_in_a_checkpoint_are_an_error(tmp_path):
    weights = pretrained(create(DEIT.format("qkv"), **TINY_DEIT), tmp_path)
    for classes in (5, 3):  # with other classes timm loads what fits
        with pytest.raises(ValueError, match=r"differ, .* blocks\.0\.attn\.positions\.0"):
            create(DEIT.format("k"), **TINY_DEIT | {"num_classes": classes}, **weights)


SIZES = {"img_size": 12, "patch_size": 4, "embed_dim": 8, "depth": 2, "num_heads": 2}
BUCKETS, HEAD = 50, 4


def plain():
    return timm.create_model("deit_tiny_patch16_224", num_classes=3, **SIZES)


def published(roles, heads=1):
    state = dict(plain().state_dict())
    for layer in range(2):
        for role in roles:
            shape = (heads, BUCKETS, HEAD) if role == "v" else (heads, HEAD, BUCKETS)
            state[f"blocks.{layer}.attn.rpe_{role}.lookup_table_weight"] = torch.randn(shape)
    return state


@pytest.mark.parametrize("roles", ["k", "qk", "qkv"])
def test_it_computes_what_the_published_options_compute(roles, tmp_path):
    """Against our own encoding with the authors' lookup, which equals their code."""
    state = published(roles)
    torch.save({"model": state, "epoch": 3}, tmp_path / "irpe.pth")
    model = load_published_irpe(attach(plain(), "irpe-product", roles), tmp_path / "irpe.pth")
    transposed = {"q_ids_transposed": True} if "q" in roles else {}
    reference = attach(plain(), "irpe-product", roles, **transposed)
    theirs = load_published_irpe(copy.deepcopy(reference), tmp_path / "irpe.pth")

    own = {name: value for name, value in state.items() if "rpe_" not in name}
    for layer in range(2):
        for letter in roles:
            role = {"q": "query", "k": "key", "v": "value"}[letter]
            table = state[f"blocks.{layer}.attn.rpe_{letter}.lookup_table_weight"]
            table = table if letter == "v" else table.transpose(1, 2)
            own[f"blocks.{layer}.attn.positions.0.tables.{role}"] = table
    reference.load_state_dict(own)
    pixels = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        expected = reference.eval()(pixels)
        torch.testing.assert_close(model.eval()(pixels), expected)
        torch.testing.assert_close(theirs.eval()(pixels), expected)


def test_what_does_not_fit_is_named(tmp_path):
    torch.save(published("k"), tmp_path / "k.pth")
    with pytest.raises(ValueError, match=r"k\.pth does not fit the model"):
        load_published_irpe(attach(plain(), "irpe-product", "qk"), tmp_path / "k.pth")
    for name in ("rp_rows.lookup_table_weight", "lookup_table_bias"):
        with pytest.raises(ValueError, match=f"{name}: only tables of contextual iRPE-product"):
            from_published({f"blocks.0.attn.rpe_k.{name}": torch.zeros(1, 4, 8)})
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_published_irpe(plain(), tmp_path / "nowhere.pth")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("irpe-euclidean", {"ratio": 12.25}, "method is 'product'; .*positions.0 has 'euclidean'"),
        ("irpe-product", {"mode": "bias"}, "mode is 'contextual'; .* has 'bias'"),
        ("irpe-product", {"function": "clip"}, "function is 'piecewise'; .* has 'clip'"),
        ("irpe-product", {"ratio": 1.5}, r"ratio is 1\.9; .* has 1\.5"),
        ("irpe-product", {"prefix_bucket": False}, r"key is \(1, 50, 4\) there and \(1, 49, 4\)"),
        ("irpe-product", {"on": "kv"}, r"value is missing there and \(1, 50, 4\) here"),
    ],
)
def test_a_model_that_would_read_the_tables_otherwise_is_refused_unchanged(
    name, options, message, tmp_path
):
    torch.save(published("k"), tmp_path / "k.pth")
    model = attach(plain(), name, **{"on": "k", **options})
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    with pytest.raises(ValueError, match=rf"k\.pth.*{message}"):
        load_published_irpe(model, tmp_path / "k.pth")
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())
