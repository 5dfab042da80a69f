"""Positioned layers against timm's own, and against our attention with the same weights."""

from __future__ import annotations

import copy

import pytest
import torch
from timm.models.swin_transformer import WindowAttention
from timm.models.vision_transformer import Attention as TimmAttention
from torch import nn
from torch.overrides import TorchFunctionMode

from vlp.layers.attention import Attention, attend
from vlp.layers.backbones.attention import Places, PositionedAttention, PositionedWindowAttention
from vlp.positions import PositionEncoding, create_position

WIDTH, HEADS, GRID, PREFIX = 8, 2, (2, 3), 1
TOKENS = PREFIX + GRID[0] * GRID[1]
OPTIONS = [
    {},
    {"qkv_bias": True, "proj_bias": False},
    {"qk_norm": True, "norm_layer": nn.LayerNorm},
    {"qk_norm": True, "scale_norm": True, "norm_layer": nn.LayerNorm},
    {"attn_drop": 0.5, "proj_drop": 0.5},
]


def timm_layer(**options):
    layer = TimmAttention(WIDTH, HEADS, **options).double().eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    layer.fused_attn = False
    return layer


def positioned(layer, *encodings, fused=None):
    layer = copy.deepcopy(layer)
    layer.__class__ = PositionedAttention
    layer.positions = nn.ModuleList(encodings)
    layer.places = Places(PREFIX)
    layer.places.write(*GRID)
    layer.fused = fused
    return layer


def encoding(name="irpe-product", **options):
    position = create_position(name, width=WIDTH, heads=HEADS, **options).double()
    for parameter in position.parameters():
        nn.init.normal_(parameter)
    return position


def states(batch=2, tokens=TOKENS):
    return torch.randn(batch, tokens, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_without_encodings_it_is_timms(options):
    layer, x = timm_layer(**options), states()
    assert torch.equal(positioned(layer)(x), layer(x))
    layer.fused_attn = True
    torch.testing.assert_close(positioned(layer, fused=True)(x), layer(x))


def test_gates_of_newer_timm():
    try:
        layer = timm_layer(gated=True)
    except TypeError:
        pytest.skip("this timm has no gated attention")
    x = states()
    assert torch.equal(positioned(layer)(x), layer(x))
    ungated = positioned(layer)
    ungated.gate = None
    assert not torch.equal(ungated(x), layer(x))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "mask",
    [
        torch.randn(TOKENS, TOKENS).double(),
        torch.randn(2, HEADS, TOKENS, TOKENS).double(),
        (torch.arange(TOKENS) < 5).expand(2, 1, TOKENS, TOKENS),
    ],
    ids=["added", "added to each head", "boolean"],
)
def test_masks(mask, fused):
    layer, x = timm_layer(), states()
    ours = positioned(layer, fused=fused)
    layer.fused_attn = True  # older timm cannot do boolean masks otherwise
    torch.testing.assert_close(ours(x, attn_mask=mask), layer(x, attn_mask=mask))
    assert not torch.allclose(ours(x, attn_mask=mask), ours(x))


@pytest.mark.parametrize("fused", [False, True])
def test_causal_attention(fused):
    layer, x = timm_layer(), states()
    ours = positioned(layer, fused=fused)
    layer.fused_attn = True
    out = ours(x, is_causal=True)
    for count in range(TOKENS):  # every token sees itself and those before
        mask = torch.arange(TOKENS) <= count
        expected = layer(x, attn_mask=mask.expand(TOKENS, TOKENS))
        torch.testing.assert_close(out[:, count], expected[:, count])


def test_dropout_in_training_is_timms():
    layer, x = timm_layer(attn_drop=0.5, proj_drop=0.25).train(), states()
    results = []
    for one in (layer, positioned(layer)):
        torch.manual_seed(3)
        results.append(one(x))
    assert torch.equal(*results)
    assert not torch.equal(results[0], layer.eval()(x))


def test_values_are_encoded_with_what_dropout_left():
    seen = []

    class Seen(PositionEncoding):
        def value(self, attention, context):
            seen.append(attention)

    layer = positioned(timm_layer(attn_drop=0.5), Seen(), fused=True).train()  # no fusing
    layer(states(16))
    assert 0.3 < seen[0].eq(0).double().mean() < 0.7


def test_fused_dropout_has_its_rate_and_stops_in_evaluation():
    query = torch.zeros(1, 1, 200, 4)
    value = torch.eye(200)[None, None]
    out = attend(query, query, value, fused=True, dropout=0.25)
    explicit = attend(query, query, value, fused=False, dropout=0.25)
    for attention in (out, explicit):
        assert abs(attention.eq(0).double().mean() - 0.25) < 0.02
        torch.testing.assert_close(attention.max(), torch.tensor(1 / 200 / 0.75))
    layer = positioned(timm_layer(attn_drop=0.9), fused=True)
    x = states()
    assert torch.equal(layer(x), layer(x))
    assert not torch.equal(layer.train()(x), layer(x))


@pytest.mark.parametrize("on", [("key",), ("query", "key"), ("query", "key", "value")])
def test_encodings_act_as_in_our_attention(on):
    """Our attention is held against loops and equations in its own tests."""
    layer, position, x = timm_layer(qkv_bias=True), encoding(roles=on), states()
    ours = Attention(WIDTH, HEADS, positions=[position]).double()
    with torch.no_grad():
        for index, part in enumerate((ours.query, ours.key, ours.value)):
            part.weight.copy_(layer.qkv.weight.chunk(3)[index])
            part.bias.copy_(layer.qkv.bias.chunk(3)[index])
    ours.output.load_state_dict(layer.proj.state_dict())
    both = positioned(layer, position)
    torch.testing.assert_close(both(x), ours(x, context=both.places.read(TOKENS)))
    assert not torch.allclose(both(x), layer(x))


@pytest.mark.parametrize("on", [("key",), ("query", "key"), ("query", "key", "value")])
def test_fused_and_explicit_agree(on):
    layer, x = timm_layer(), states()
    positions = encoding(roles=on), encoding("irpe-cross", roles=on)
    results = [positioned(layer, *positions, fused=fused)(x) for fused in (False, True)]
    torch.testing.assert_close(*results)


class Turned(PositionEncoding):
    """Reverses the channels of the queries."""

    def rotate(self, query, key, context):
        assert context.grid == GRID
        assert context.prefix_tokens == PREFIX
        return query.flip(-1), key


@pytest.mark.parametrize("fused", [False, True])
def test_rotation_comes_after_the_norm_of_queries(fused):
    layer, x = timm_layer(qk_norm=True, norm_layer=nn.LayerNorm), states()
    turned = copy.deepcopy(layer)
    turned.q_norm.register_forward_hook(lambda _, __, out: out.flip(-1))
    torch.testing.assert_close(positioned(layer, Turned(), fused=fused)(x), turned(x))


def test_a_hook_reads_the_probabilities_where_timm_has_them():
    taken = []
    layer, x = timm_layer(), states()
    ours = positioned(layer, encoding(roles=("value",)))
    for one in (layer, ours):
        one.attn_drop.register_forward_hook(lambda _, __, out: taken.append(out))
        one(x)
    assert torch.equal(*taken)


class Calls(TorchFunctionMode):
    """Counts calls of PyTorch's attention that no layer takes the place of."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.nn.functional.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def test_timms_switch_off_is_heeded():
    """`fused_attn` is False where timm exports or the user says so; `fused` overrides it."""
    for device in ("cpu", "meta"):  # meta stands for accelerators
        layer, x = positioned(timm_layer()).to(device), states().to(device)
        for fused, switch, calls in (
            (None, False, 0),
            (True, False, 1),
            (None, True, device == "meta"),
        ):
            layer.fused, layer.fused_attn = fused, switch
            with Calls() as seen:
                layer(x)
            assert seen.count == calls


def test_tokens_without_a_place_are_an_error():
    layer = positioned(timm_layer(), encoding())
    with pytest.raises(ValueError, match=r"no image of this model has 5 tokens \(7\)"):
        layer(states(tokens=5))
    layer.places = Places(PREFIX)
    with pytest.raises(ValueError, match=r"7 tokens \(none so far\)"):
        layer(states())


def test_places_keep_grids_of_other_sizes():
    places = Places(2)
    places.write(3, 4)
    places.write(1, 5)
    assert (places.read(14).grid, places.read(7).grid) == ((3, 4), (1, 5))
    places.write(6, 2)
    assert places.read(14).grid == (6, 2)
    assert places.read(14).prefix_tokens == 2


def test_bfloat16_autocast():
    layer = timm_layer().float()
    low = positioned(layer, encoding(roles=("query", "key", "value")).float())
    x = states().float()
    expected = low(x)
    with torch.autocast("cpu", torch.bfloat16):
        for fused in (False, True):
            low.fused = fused
            out = low(x, attn_mask=(torch.arange(TOKENS) > 9).expand(TOKENS, TOKENS))
            assert out.isfinite().all()  # no key at all
            out = low(x)
            assert out.dtype == torch.bfloat16
            torch.testing.assert_close(out.float(), expected, atol=0.2, rtol=0.05)
    out.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in low.parameters())


WINDOW = (2, 3)


def window_layer(**options):
    layer = WindowAttention(WIDTH, HEADS, window_size=WINDOW, **options).double().eval()
    nn.init.normal_(layer.relative_position_bias_table)
    return layer


def in_windows(layer, *encodings, fused=None):
    layer = copy.deepcopy(layer)
    layer.__class__ = PositionedWindowAttention
    layer.positions = nn.ModuleList(encodings)
    layer.fused = fused
    return layer


def shift_mask(windows):
    return torch.zeros(windows, 6, 6).double().masked_fill(torch.rand(windows, 6, 6) < 0.3, -100.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_windows_without_encodings_are_timms(masked, fused):
    layer, x = window_layer(attn_drop=0.5), states(6, 6)
    mask = shift_mask(3) if masked else None
    ours = in_windows(layer, fused=fused)
    torch.testing.assert_close(ours(x, mask=mask), layer(x, mask=mask))


@pytest.mark.parametrize("masked", [False, True])
def test_windows_add_the_bias_to_their_own(masked, monkeypatch):
    layer, x = window_layer(), states(6, 6)
    position = encoding(mode="bias", shared_heads=False)
    mask = shift_mask(2) if masked else None
    results = [in_windows(layer, position, fused=fused)(x, mask) for fused in (False, True)]
    torch.testing.assert_close(*results)
    place = Places(0).write(*WINDOW)
    query = torch.zeros(1, HEADS, 6, WIDTH // HEADS).double()
    table = layer._get_rel_pos_bias() + position("bias", query, query, place)
    monkeypatch.setattr(layer, "_get_rel_pos_bias", lambda: table)
    torch.testing.assert_close(results[0], layer(x, mask))


def test_windows_of_another_size_after_set_window_size():
    layer = in_windows(window_layer(), encoding(roles=("key", "value")))
    layer.set_window_size((3, 4))
    seen = []
    layer.positions[0].register_forward_pre_hook(lambda _, given: seen.append(given[-1]))
    assert layer(states(4, 12)).shape == (4, 12, WIDTH)
    assert [(context.grid, context.prefix_tokens) for context in seen] == [((3, 4), 0)] * 2
