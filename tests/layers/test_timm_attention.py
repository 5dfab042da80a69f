import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from timm.models.swin_transformer import WindowAttention
from timm.models.vision_transformer import Attention as TimmAttention
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import Siglip2VisionConfig, Siglip2VisionModel

from vlp.layers.attention import Attention, attend
from vlp.layers.backbones.attention import (
    ContextStore,
    PositionedAttention,
    PositionedWindowAttention,
)
from vlp.positions import PositionEncoding, attach, create_position

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
    layer.context_store = ContextStore(PREFIX)
    layer.context_store.write(*GRID)
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
    layer, position, x = timm_layer(qkv_bias=True), encoding(roles=on), states()
    ours = Attention(WIDTH, HEADS, positions=[position]).double()
    with torch.no_grad():
        for index, part in enumerate((ours.query, ours.key, ours.value)):
            part.weight.copy_(layer.qkv.weight.chunk(3)[index])
            part.bias.copy_(layer.qkv.bias.chunk(3)[index])
    ours.output.load_state_dict(layer.proj.state_dict())
    both = positioned(layer, position)
    torch.testing.assert_close(both(x), ours(x, context=both.context_store.read(TOKENS)))
    assert not torch.allclose(both(x), layer(x))


class Turned(PositionEncoding):
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
    with pytest.raises(
        ValueError, match="attention got 5 tokens, and the model's images had 7 tokens"
    ):
        layer(states(tokens=5))
    layer.context_store = ContextStore(PREFIX)
    with pytest.raises(ValueError, match="got 7 tokens, and the model's images had no tokens"):
        layer(states())


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
    place = ContextStore(0).write(*WINDOW)
    query = torch.zeros(1, HEADS, 6, WIDTH // HEADS).double()
    table = layer._get_rel_pos_bias() + position("bias", query, query, place)
    monkeypatch.setattr(layer, "_get_rel_pos_bias", lambda: table)
    torch.testing.assert_close(results[0], layer(x, mask))


SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
GRIDS = [(3, 6), (4, 2), (4, 4)]


def siglip():
    config = Siglip2VisionConfig(**SIZES, num_attention_heads=2, num_patches=16, patch_size=4)
    return Siglip2VisionModel(config).eval()


def padded(images):
    return nn.utils.rnn.pad_sequence(images, batch_first=True)


def run(model, images, grids):
    pixels, mask = padded(images), padded([torch.ones(len(one)) for one in images]).bool()
    return model(pixels, mask.long(), torch.tensor(grids)).pooler_output


def test_padded_images_of_as_many_tokens_are_no_grid():
    model = attach(siglip(), "irpe-product")
    patches = torch.randn(1, 16, 48)
    every, some = torch.ones(1, 16).long(), (torch.arange(16) < 12).long()[None]
    model(patches, every, torch.tensor([[4, 4]]))
    with pytest.raises(ValueError, match="irpe-product needs a grid, but these tokens have coord"):
        model(patches, some, torch.tensor([[3, 4]]))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cope", {}),
        ("fourier", {}),
        ("md-sine", {}),
        ("mlp", {}),
        ("rope-1d", {}),
        ("rope-axial", {}),
        ("rope-axial", {"rescale": True}),
        ("rope-mixed", {}),
        ("sine-1d", {"extent": 10.0}),
        ("sine-2d", {}),
        ("sine-2d", {"extent": 10.0}),
    ],
)
def test_an_image_is_what_it_is_alone_in_every_batch(name, options):
    torch.manual_seed(0)
    model = attach(siglip(), name, **options)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    images = [torch.randn(rows * columns, 48) for rows, columns in GRIDS]
    together = run(model, images, GRIDS)
    for one, image, grid in zip(together, images, GRIDS, strict=True):
        torch.testing.assert_close(run(model, [image], [grid])[0], one, atol=1e-4, rtol=1e-4)


def test_threads_send_images_of_different_grids():
    sizes = {"embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 4, "num_classes": 4}
    vit = timm.create_model("vit_tiny_patch16_224", img_size=16, dynamic_img_size=True, **sizes)
    model = attach(vit.eval(), "alibi-2d")
    wide, high = torch.randn(1, 3, 8, 32), torch.randn(1, 3, 32, 8)
    with torch.no_grad():
        expected = model(wide)
    with ThreadPoolExecutor(1) as other, torch.no_grad():

        def ask_beside(*_):
            hook.remove()
            other.submit(model, high).result()

        hook = vit.blocks[0].register_forward_pre_hook(ask_beside)
        assert torch.equal(model(wide), expected)


def test_a_thread_that_wrote_nothing_reads_what_was_written_last():
    store = ContextStore(0)
    store.write(2, 8)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(store.read, 16).result().grid == (2, 8)
        other.submit(store.write, 4, 4).result()
        assert store.read(16).grid == (2, 8)
        assert other.submit(store.read, 16).result().grid == (4, 4)
    for again in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert again.read(16).grid == (4, 4)
