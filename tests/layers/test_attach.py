import copy
import subprocess
import sys

import pytest
import timm
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from vlp.positions import (
    CROSS_MODAL,
    PositionEncoding,
    attach,
    create_position,
    drop_absolute,
    list_positions,
)
from vlp.training.optimiser import exempt_from_decay

WIDTH = 16
COMMON = {"embed_dim": WIDTH, "mlp_ratio": 1, "num_classes": 5}
SIZES = COMMON | {"img_size": (16, 24), "patch_size": 4, "depth": 2, "num_heads": 2}
SWIN = COMMON | {"img_size": (16, 32), "patch_size": 2, "depths": (2, 2), "num_heads": (2, 4)}
GRID = (4, 6)


def explicit(model):
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    return model.double().eval()


def vit(**options):
    return explicit(VisionTransformer(**{**SIZES, **options}))


def distilled(**options):
    return explicit(VisionTransformerDistilled(**{**SIZES, **options}))


def swin(**options):
    return explicit(SwinTransformer(**{**SWIN, "window_size": 4, **options}))


MODELS = {"vit": vit, "distilled": distilled, "swin": swin}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def images(height=16, width=None, batch=2):
    return torch.randn(batch, 3, height, width or 2 * height).double()


def images_of(model, **options):
    return images(*model.patch_embed.img_size, **options)


def fill(model):
    """Tables begin at zero; from here on they matter."""
    for module in model.modules():
        if isinstance(module, PositionEncoding):
            for parameter in module.parameters():
                nn.init.normal_(parameter)
    return model


def encoded(make, **options):
    return fill(attach(make(**options), "irpe-product", on="qkv"))


class Recorder(PositionEncoding):
    def __init__(self):
        super().__init__()
        self.contexts = []

    def bias(self, query, key, context):
        self.contexts.append(context)


@every_model
def test_weights_and_their_names_are_kept(make):
    model = make()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    attach(attach(model, "irpe-product", on="qk"), "learned-2d")
    after = model.state_dict()
    assert all(torch.equal(after.pop(name), weight) for name, weight in before.items())
    layers = (
        [f"layers.{stage}.blocks.{block}.attn" for stage in range(2) for block in range(2)]
        if make is swin
        else [f"blocks.{block}.attn" for block in range(2)]
    )
    tokens = "patch_embed.positions.0" if make is swin else "positions.0"
    assert set(after) == {
        *(f"{layer}.positions.0.tables.{role}" for layer in layers for role in ("query", "key")),
        *(f"{tokens}.table_{axis}" for axis in ("rows", "columns")),
    }


def test_on_is_what_encodings_call_roles_or_mode():
    (position,) = attach(vit(), "irpe-product", on="vk", ratio=0.6).blocks[1].attn.positions
    assert position.roles == ("key", "value")
    assert position.tables["key"].shape == (1, 3 * 3 + 1, WIDTH // 2)
    assert position.grid == GRID
    modes = {"q": ("query",), "k": ("key",), "qk": ("key", "query"), "kq": ("key", "query")}
    for on, expected in (modes | {None: ("key",)}).items():
        assert attach(vit(), "sape", on).blocks[0].attn.positions[0].modes == expected


@pytest.mark.parametrize("make", [vit, distilled])
@pytest.mark.parametrize("options", [{}, {"patch_drop_rate": 0.5}, {"pos_drop_rate": 0.5}])
def test_tokens_are_encoded_once_after_the_absolute_positions(make, options):
    """learned-1d is what pos_embed already is."""
    model = make(**options)
    prefix = model.num_prefix_tokens
    x, by_hand = images(16, 24), copy.deepcopy(model)
    attach(model, "learned-1d")
    with torch.no_grad():
        by_hand.pos_embed[:, prefix:] += model.positions[0].table
    torch.testing.assert_close(model(x), by_hand(x))
    if not options.get("pos_drop_rate"):
        results = []
        for one in (model, by_hand):
            torch.manual_seed(0)
            results.append(one.train().forward_features(x))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("make", [vit, distilled])
@pytest.mark.parametrize("absolute", ["keep", "drop"])
def test_dropout_of_positions_acts_once(make, absolute):
    model = attach(make(pos_drop_rate=0.5), "learned-1d", absolute=absolute).train()
    seen = []
    model.pos_drop.register_forward_hook(lambda _, given, out: seen.append(out))
    model(images(16, 24))
    assert len(seen) == 1
    assert 0.3 < seen[0].eq(0).double().mean() < 0.7


@pytest.mark.parametrize("make", [vit, distilled])
@pytest.mark.parametrize("dynamic", [False, True])
def test_absolute_positions_dropped(make, dynamic):
    model = make(dynamic_img_size=dynamic)
    x, by_hand = images(16, 24), copy.deepcopy(model)
    nn.init.zeros_(by_hand.pos_embed)
    nn.init.normal_(model.pos_embed)
    attach(model, "irpe-product", absolute="drop")
    torch.testing.assert_close(model(x), by_hand(x))
    assert model.pos_embed is None
    assert "pos_embed" not in model.state_dict()
    attach(model, "learned-2d", absolute="drop", deviation=1.0)  # gone already
    assert not torch.allclose(model(x), by_hand(x))


@pytest.mark.parametrize("strict", [True, False])
def test_the_bias_of_a_swin_dropped_for_nothing(strict):
    model = swin(strict_img_size=strict)
    x, by_hand = images(), copy.deepcopy(model)
    for layer in (part for part in by_hand.modules() if hasattr(part, "qkv")):
        nn.init.zeros_(layer.relative_position_bias_table)
    assert not torch.allclose(model(x), by_hand(x))
    assert drop_absolute(model) is model
    torch.testing.assert_close(model(x), by_hand(x))
    assert not any("bias_table" in name for name in model.state_dict())
    if strict:
        for one in (model, by_hand):
            one.set_input_size(img_size=(32, 32), window_size=(8, 4))
    x = images(32, 32)
    torch.testing.assert_close(model(x), by_hand(x))
    drop_absolute(attach(model, "irpe-product"))  # gone already
    torch.testing.assert_close(model(x), by_hand(x))


def test_tokens_of_a_swin_are_its_embedded_patches():
    model, x = swin(), images()
    patches = model.patch_embed(x)
    position = create_position("learned-2d", width=WIDTH, grid=(8, 16), deviation=1.0).double()
    attach(model, lambda: position)
    rows, columns = position.table_rows, position.table_columns
    half = WIDTH // 2
    expected = patches.clone()
    expected[..., :half] += rows[None, :, None]
    expected[..., half:] += columns[None, None]
    torch.testing.assert_close(model.patch_embed(x), expected)


def test_dynamic_image_sizes():
    options = {"pos_embed": "none"}
    dynamic = encoded(vit, dynamic_img_size=True, **options)
    for size in ((16, 24), (32, 12), (8, 48)):
        fixed = attach(vit(img_size=size, **options), "irpe-product", on="qkv")
        fixed.load_state_dict(dynamic.state_dict())
        x = images(*size)
        torch.testing.assert_close(dynamic(x), fixed(x))
    padded = attach(vit(dynamic_img_size=True, dynamic_img_pad=True), Recorder)
    padded(images(15, 17))
    assert padded.blocks[0].attn.positions[0].contexts[0].grid == (4, 5)


@pytest.mark.parametrize(
    ("make", "sizes", "grid"),
    [
        (vit, ({"img_size": (32, 16)}, {"patch_size": 2}), (16, 8)),
        (swin, ({"img_size": (32, 32), "window_size": (8, 4)},), (8, 4)),
    ],
)
def test_set_input_size(make, sizes, grid):
    plain, model = make(), make()
    model.load_state_dict(plain.state_dict())
    attach(model, "irpe-product", on="qkv")
    for changes in sizes:
        for one in (plain, model):
            one.set_input_size(**changes)
        x = images_of(model)
        assert torch.equal(model(x), plain(x))
    layer = [part for part in attach(model, Recorder).modules() if hasattr(part, "qkv")][1]
    fill(model)(x)
    (context,) = layer.positions[1].contexts
    assert (context.grid, context.prefix_tokens) == (grid, int(make is vit))


def test_a_copy_writes_its_own_places():
    model = encoded(vit, dynamic_img_size=True)
    other = copy.deepcopy(model)
    other(images(16, 32))
    with pytest.raises(ValueError, match="33 tokens"):
        model.context_store.read(33)
    assert all(block.attn.context_store is other.context_store for block in other.blocks)
    assert other.context_store.read(33).grid == (4, 8)


def test_activation_checkpointing_with_images_of_two_sizes():
    """Layers run again in the backward pass, when the other size was the last to be seen."""
    model = encoded(vit, dynamic_img_size=True).train()
    sizes = images(16, 24), images(8, 8)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        sum(model(x).square().sum() for x in sizes).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("block", ["ResPostBlock", "ParallelThingsBlock"])
def test_other_blocks_with_timms_attention(block):
    module = sys.modules[VisionTransformer.__module__]
    model = vit(block_fn=getattr(module, block), qk_norm=True)
    x = images(16, 24)
    before = model(x)
    attach(model, "irpe-product", on="qkv")
    torch.testing.assert_close(model(x), before)
    assert not torch.allclose(fill(model)(x), before)


def test_layer_wise_learning_rates_count_token_encodings_to_the_stem():
    model = attach(attach(vit(), "learned-2d"), "irpe-product")
    scales = {
        id(parameter): group["lr_scale"]
        for group in param_groups_layer_decay(model, layer_decay=0.5)
        for parameter in group["params"]
    }
    stem = scales[id(model.patch_embed.proj.weight)]
    assert scales[id(model.positions[0].table_rows)] == stem
    for block in model.blocks:
        (table,) = block.attn.positions.parameters()
        assert scales[id(table)] == scales[id(block.attn.qkv.weight)] > stem


@pytest.mark.parametrize("name", sorted({*list_positions()} - {*CROSS_MODAL}))
def test_timm_and_our_optimiser_decay_the_same(name):
    model = attach(vit(), name)
    groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    decayed = {
        id(weight) for group in groups if group["weight_decay"] for weight in group["params"]
    }
    without = exempt_from_decay(model)
    for key, weight in model.named_parameters():
        assert (id(weight) in decayed) == (key not in without), key


@pytest.mark.parametrize(
    ("make", "name"), [(vit, "irpe-product"), (distilled, "learned-2d"), (swin, "alibi-2d")]
)
@pytest.mark.filterwarnings("ignore")  # jit is deprecated, and says what it turns into constants
def test_a_traced_model_is_the_same(make, name):
    model = fill(attach(make(), name))
    x = images_of(model)
    traced = torch.jit.trace(model, (x,), check_trace=False)
    other = images_of(model, batch=3)
    torch.testing.assert_close(traced(other), model(other))


@every_model
def test_fused_is_refused_where_nothing_heeds_it(make):
    model = make()
    kind = type(model)
    with pytest.raises(ValueError, match=r"fused=False is about attention .*: learned-2d acts on"):
        attach(model, "learned-2d", fused=False)
    assert type(model) is kind
    attach(attach(model, "irpe-product"), "learned-2d", fused=True)
    layers = [part for part in model.modules() if hasattr(part, "qkv")]
    assert layers
    assert all(layer.fused is True for layer in layers)


class Numbers(PositionEncoding):
    """Reads a number in its constructor, which tensors on `meta` do not have."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.full((2,), torch.ones(3).sum().item()))

    def bias(self, query, key, context):
        return None


def test_type_device_and_mode_are_the_models():
    model = attach(vit().to(torch.bfloat16), "irpe-product")
    (position,) = model.blocks[0].attn.positions
    assert position.tables["key"].dtype == torch.bfloat16
    assert not position.training
    model = VisionTransformer(**SIZES).to("meta")
    with torch.device("meta"):
        attach(attach(attach(model, "irpe-product"), "learned-2d"), Numbers)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.blocks[0].attn.positions[0].training


class OnInputs(PositionEncoding):
    def inputs(self, query, key, value, context):
        return query, key, value


class OnBoth(PositionEncoding):
    def tokens(self, x, context):
        return x

    def bias(self, query, key, context):
        return None


@pytest.mark.parametrize(
    ("make", "arguments", "options", "message"),
    [
        (vit, ("irpe",), {}, "unknown position encoding 'irpe' .*; known: .*irpe-product"),
        (vit, ("anchor",), {}, "anchor acts between an image and a text"),
        (swin, ("uniform",), {}, "uniform acts between an image and a text"),
        (vit, (OnInputs,), {}, "OnInputs has the hooks inputs; an attached"),
        (swin, (OnBoth,), {}, "OnBoth has the hooks bias, tokens; an"),
        (vit, ("irpe-product", "x"), {}, "irpe-product: on='x' must be different letters of 'qkv'"),
        (vit, ("irpe-product", ""), {}, "on='' must be"),
        (vit, ("irpe-product", "kk"), {}, "on='kk' must be"),
        (vit, ("learned-2d", "k"), {}, "learned-2d has no choice of .*: on='k'"),
        (vit, ("sape", "qv"), {}, "sape acts on queries and keys, not on='qv'"),
        (vit, ("sape", "q"), {"mode": "key"}, "on='q' and mode='key' exclude"),
        (vit, ("irpe-product", "k"), {"roles": ("query",)}, r"on='k' and roles=.* exclude"),
        (vit, ("irpe-product", "v"), {"mode": "bias"}, "bias mode has no encoding on values"),
        (vit, ("irpe-product",), {"groups": 2}, "'irpe-product': .*'groups'"),
        (vit, ("irpe-product", "k", "lose"), {}, "absolute is 'keep' or 'drop', not 'lose'"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_the_model(make, arguments, options, message):
    model = make()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        attach(model, *arguments, **options)
    assert [type(module) for module in model.modules()] == kinds


class OtherAttention(type(vit().blocks[0].attn)):
    pass


class OtherEmbed(type(swin().patch_embed)):
    pass


def test_other_models_and_layers_are_refused_by_name():
    wrapped = timm.create_model("vit_tiny_patch16_224", depth=1, features_only=True, out_indices=1)
    mixed, other_swin = vit(), swin(embed_layer=OtherEmbed)
    mixed.blocks[1].attn.__class__ = OtherAttention
    for model, name, message in (
        (nn.Linear(2, 2), "irpe-product", "Linear has no layer of attention"),
        (wrapped, "irpe-product", "FeatureGetterNet is not among .* before anything wraps"),
        (vit(block_fn=ParallelScalingBlock), "irpe-product", "ScalingBlock without a layer of att"),
        (mixed, "irpe-product", "Block with OtherAttention"),
        (other_swin, "learned-2d", "learned-2d acts on .* not OtherEmbed"),
        (vit(patch_drop_rate=0.25), "irpe-product", r"irpe-product .*patch_drop_rate 0\.25"),
    ):
        kind = type(model)
        with pytest.raises(ValueError, match=message):
            attach(model, name)
        assert type(model) is kind
    attach(other_swin, "irpe-product")(images())
    with pytest.raises(TypeError, match="attach takes a model, not 'vit_tiny_patch16_224'"):
        attach("vit_tiny_patch16_224", "sine-2d")
    with pytest.raises(ValueError, match="Linear has no layer of attention"):
        drop_absolute(nn.Linear(2, 2))


class Scaled(PositionEncoding):
    def __init__(self, heads: int, strength: float = 1.0):
        super().__init__()
        self.heads, self.strength = heads, strength

    def bias(self, query, key, context):
        return None


class Passing(Scaled):
    def __init__(self, heads: int, **options):
        super().__init__(heads, **options)


def test_classes_and_functions_make_encodings():
    for make in (Scaled, Passing, lambda heads, **options: Scaled(heads, **options)):
        model = attach(vit(), make, strength=2.0)
        assert [block.attn.positions[0].strength for block in model.blocks] == [2.0, 2.0]
        model(images(16, 24))
    for options, message in (
        ({"strenght": 2.0}, r"'Scaled': no option 'strenght' \(did you mean 'strength'\?\)"),
        ({"strength": "high"}, "'Scaled': the option 'strength' takes float, not 'high'"),
    ):
        with pytest.raises(ValueError, match=message):
            attach(vit(), Scaled, **options)
    for make, message in (
        (create_position("alibi-2d", heads=2), "a DirectionalDistance cannot .* each layer"),
        (nn.Linear(2, 2), "a Linear cannot be attached: give the name or the class"),
        (nn.Identity, "Identity cannot be attached: give the name or the class"),
        (dict, "dict cannot be attached"),
        (None, "a NoneType cannot be attached"),
        (lambda: nn.Identity(), "<lambda> makes no PositionEncoding, but Identity"),
    ):
        with pytest.raises(TypeError, match=message):
            attach(vit(), make)


def test_positions_are_imported_without_timm():
    probe = "import sys, vlp.positions; print('timm' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
