import itertools

import pytest
import torch
from torch import nn

from vlp.layers.attention import Attention
from vlp.positions import (
    ByModality,
    PositionContext,
    PositionEncoding,
    acts_on_tokens,
    create_fitting_position,
    list_positions,
)
from vlp.positions.base import TokenEncoding, cached_constant, mix

WIDTH, HEADS, GRID = 16, 2, (2, 3)
TOKEN_ENCODINGS = [name for name in list_positions() if acts_on_tokens(name)]
BOXES = torch.tensor([[[0.0, 0, 2, 1], [1, 0, 2, 2]]])


def encoding_of(name, **options):
    if name == "fourier":
        options["norm"] = True
    if name == "sine-4d":
        options["mlp"] = 5
    sizes = {"width": WIDTH, "heads": HEADS, "grid": GRID}
    return create_fitting_position(name, sizes, **options)


def test_mix_is_reading_v8():
    tokens, positions = torch.randn(2, 5, 4).double(), torch.randn(1, 5, 4).double()
    alpha, beta = torch.randn(4).double(), torch.randn(4).double()
    out = mix(tokens, positions, alpha, beta)
    for image, token, channel in itertools.product(range(2), range(5), range(4)):
        expected = alpha[channel] * tokens[image, token, channel]
        expected = expected + beta[channel] * positions[0, token, channel]
        assert out[image, token, channel] == expected
    inputs = [x.requires_grad_() for x in (tokens, positions, alpha, beta)]
    assert torch.autograd.gradcheck(mix, inputs)


def test_mix_computes_half_precision_in_float32():
    """3 * 85.5 + 1 = 257.5 rounds to 258; each step in bfloat16 would end at 256."""
    token = torch.full((1, 1, 1), 85.5, dtype=torch.bfloat16)
    position = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    alpha, beta = torch.full((1,), 3.0), torch.ones(1)
    assert alpha.bfloat16() * token + position == 256
    mixed = mix(token, position, alpha.bfloat16(), beta.bfloat16())
    assert mixed.dtype == torch.bfloat16
    assert mixed == 258


@pytest.mark.parametrize("name", TOKEN_ENCODINGS)
def test_the_mixer_weighs_tokens_and_places(name):
    context = PositionContext(GRID, 1, boxes=BOXES)
    torch.manual_seed(0)
    plain = encoding_of(name).double()
    mixed = encoding_of(name, mixer=True).double()
    assert set(mixed.state_dict()) - set(plain.state_dict()) == {"alpha", "beta"}
    mixed.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(3, 7, WIDTH).double()
    added = plain("tokens", x, context)
    assert torch.equal(added[:, :1], x[:, :1])
    assert not torch.equal(added[:, 1:], x[:, 1:])
    torch.testing.assert_close(mixed("tokens", x, context), added)  # both vectors start at 1

    with torch.no_grad():
        mixed.alpha.normal_()
        mixed.beta.normal_()
    expected = mixed.alpha * x + mixed.beta * (added - x)
    torch.testing.assert_close(mixed("tokens", x, context), expected)
    assert plain.hooks == mixed.hooks == {"tokens"}


@pytest.mark.parametrize("name", TOKEN_ENCODINGS)
@pytest.mark.parametrize("mixer", [False, True])
def test_kinds_and_finite_gradients(name, mixer):
    context = PositionContext(GRID, 1, boxes=BOXES)
    for kind in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        encoding = encoding_of(name, mixer=mixer)
        x = torch.zeros(2, 7, WIDTH, dtype=kind, requires_grad=True)
        out = encoding("tokens", x, context)
        assert out.dtype == kind
        assert out.isfinite().all()
        out.float().square().sum().backward()
        assert x.grad.isfinite().all()
        for parameter in encoding.parameters():
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()


def test_tokens_and_places_that_do_not_fit_are_named():
    encoding = encoding_of("object")
    for shape in ((1, 6, 8), (6, WIDTH)):
        with pytest.raises(ValueError, match=r"object is for tokens .* 16\), not "):
            encoding("tokens", torch.zeros(shape), PositionContext(GRID))
    context = PositionContext(GRID, boxes=BOXES.expand(3, -1, -1))
    with pytest.raises(ValueError, match="object: positions of 3 images do not fit a batch of 2"):
        encoding("tokens", torch.zeros(2, 6, WIDTH), context)
    with pytest.raises(ValueError, match="new: width 0"):
        TokenEncoding("new", 0)


TEXT = PositionContext(grid=(1, 6), prefix_tokens=1, text_queries=True)
IMAGE = PositionContext(grid=(2, 3), prefix_tokens=1, text_queries=False)


class Marked(PositionEncoding):
    def __init__(self, mark):
        super().__init__()
        self.mark = mark

    def tokens(self, x, context):
        return x + self.mark

    def inputs(self, query, key, value, context):
        return query + self.mark, key + 2 * self.mark, value + 3 * self.mark

    def rotate(self, query, key, context):
        return query * self.mark, key * -self.mark

    def bias(self, query, key, context):
        return torch.full((1, 1, query.shape[-2], key.shape[-2]), self.mark)

    def value(self, attention, context):
        return attention.sum() * self.mark


def call_all(encoding, context):
    generator = torch.Generator().manual_seed(1)
    x, y, z = (torch.rand(2, 4, 4, generator=generator) for _ in range(3))
    query, key = (torch.rand(2, 2, 4, 2, generator=generator) for _ in range(2))
    attention = torch.rand(2, 2, 4, 4, generator=generator)
    return [
        encoding("tokens", x, context),
        *encoding("inputs", x, y, z, context),
        *encoding("rotate", query, key, context),
        encoding("bias", query, key, context),
        encoding("value", attention, context),
    ]


def same(found, expected):
    return all(
        a is b or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(found, expected, strict=True)
    )


def test_each_stream_has_its_own_encoding_in_every_hook():
    text, image = Marked(2.0), Marked(3.0)
    both = ByModality(text, image)
    assert both.hooks == set(PositionEncoding.HOOKS)
    assert same(call_all(both, TEXT), call_all(text, TEXT))
    assert same(call_all(both, IMAGE), call_all(image, IMAGE))
    assert not same(call_all(both, IMAGE), call_all(both, TEXT))


@pytest.mark.parametrize("context", [TEXT, IMAGE])
def test_a_side_without_encoding_or_hook_is_left_alone(context):
    other = Marked(2.0)
    nothing = call_all(PositionEncoding(), context)
    for empty in (None, PositionEncoding()):
        both = ByModality(empty, other) if context.text_queries else ByModality(other, empty)
        assert both.hooks == set(PositionEncoding.HOOKS)
        assert same(call_all(both, context), nothing)
    assert ByModality(None, None).hooks == frozenset()


NAMES = ("irpe-product", "alibi-2d", "shaw", "transformer-xl", "rope-1d", "rope-axial",
         "rope-mixed")  # fmt: skip


class Layer(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.attention = Attention(WIDTH, HEADS, positions=[encoding_of(name)])
        for parameter in self.attention.positions.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, x):
        context = PositionContext((x.shape[1], x.shape[2]))
        return self.attention(x.flatten(1, 2), context=context)


def features(rows, columns):
    return torch.randn(2, rows, columns, WIDTH)


@pytest.mark.parametrize("name", NAMES)
def test_models_train_after_another_was_exported(name):
    x = features(7, 5)  # a grid that nothing has kept so far
    layer = Layer(name).eval()
    exported = torch.export.export(layer, (x,))
    torch.testing.assert_close(exported.module()(x), layer(x))
    other = Layer(name)
    out = other(x)
    assert type(out) is torch.Tensor
    out.square().sum().backward()
    assert other.attention.query.weight.grad.abs().max() > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["irpe-product", "alibi-2d", "transformer-xl", "rope-axial"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_layers_follow_grids_and_number_types(name, dynamic):
    torch._dynamo.reset()
    layer, constants = Layer(name), []

    def keep_graph(graph, _):
        constants.append("arange" not in str(graph.graph))
        return graph.forward

    compiled = torch.compile(layer, backend=keep_graph, fullgraph=True, dynamic=dynamic)
    for size in ((3, 4), (4, 3), (5, 5), (3, 4)):
        x = features(*size)
        torch.testing.assert_close(compiled(x), layer(x))
    layer.double()
    x = features(3, 4).double()
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-10, atol=1e-10)
    compiled(x).sum().backward()
    assert constants
    assert all(constants)


def test_results_are_kept_and_the_latest_win():
    calls = []

    @cached_constant(maxsize=2)
    def ones(size: int, dtype: torch.dtype) -> torch.Tensor:
        calls.append(size)
        return torch.ones(size, dtype=dtype)

    with torch.inference_mode():
        first = ones(3, torch.float32)
    assert ones(3, torch.float32) is first
    assert not first.is_inference()
    assert ones(3, torch.float64).dtype == torch.float64
    ones(4, torch.float64)
    assert ones(3, torch.float32) is not first
    assert calls == [3, 3, 4, 3]
