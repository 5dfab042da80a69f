import itertools
import math

import pytest
import torch

from vlp.layers.attention import Attention, CausalAttention, Past, attend, mask_bias
from vlp.positions import create_position
from vlp.positions.alibi2d import bias as distance_bias
from vlp.positions.base import PositionContext, PositionEncoding

WIDTH, HEADS, GRID = 8, 2, (2, 3)
CONTEXT = PositionContext(GRID)


def layer(**options):
    return Attention(WIDTH, HEADS, **options).double()


def states(rows, tokens):
    return torch.randn(rows, tokens, WIDTH, dtype=torch.float64)


@torch.no_grad()
def by_loops(attention, queries, source, mask=None, bias=None):
    """Probabilities (B, heads, Q, K) and the output before the output projection."""
    query, key, value = (
        getattr(attention, name)(x)
        for name, x in (("query", queries), ("key", source), ("value", source))
    )
    size = WIDTH // HEADS
    weights = torch.zeros(len(query), HEADS, query.shape[1], key.shape[1], dtype=torch.float64)
    out = torch.zeros_like(query)
    for row, head, q in itertools.product(range(len(query)), range(HEADS), range(query.shape[1])):
        part = slice(head * size, (head + 1) * size)
        keys = [k for k in range(key.shape[1]) if mask is None or mask[row, k]]
        keys = [k for k in keys if k <= q] if isinstance(attention, CausalAttention) else keys
        logits = key[row, keys, part] @ query[row, q, part] / math.sqrt(size)
        if bias is not None:
            logits = logits + bias[head, q, keys]
        weights[row, head, q, keys] = logits.exp() / logits.exp().sum()
        out[row, q, part] = weights[row, head, q] @ value[row, :, part]
    return weights, out


@pytest.mark.parametrize(
    ("kind", "options"),
    [(Attention, {"fused": False}), (Attention, {"fused": True}), (CausalAttention, {})],
)
@pytest.mark.parametrize("biased", [False, True])
@torch.no_grad()
def test_a_scale_of_the_products(kind, options, biased):
    """As with queries that are so much larger, whose bias keeps its size."""
    positions = [create_position("alibi-2d", heads=HEADS)] if biased else []
    scaled = kind(WIDTH, HEADS, positions=positions, scale=0.25, **options).double()
    plain = kind(WIDTH, HEADS, positions=positions).double()
    plain.load_state_dict(scaled.state_dict())
    for parameter in plain.query.parameters():
        parameter *= 0.25 * (WIDTH // HEADS) ** 0.5
    x, past = states(2, 6), Past()
    expected = plain(x, context=CONTEXT)
    torch.testing.assert_close(scaled(x, context=CONTEXT), expected)
    if kind is CausalAttention and not biased:
        tokens = [scaled(token, past=past) for token in x.split(1, 1)]
        torch.testing.assert_close(torch.cat(tokens, 1), expected)


@pytest.mark.parametrize("fused", [False, True, None])
@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("crossed", [False, True])
def test_equals_loops(fused, output, crossed):
    attention = layer(fused=fused, output=output)
    queries = states(2, 3)
    source = states(2, 5) if crossed else queries
    mask = torch.rand(2, source.shape[1]) < 0.7
    mask[:, 0] = True
    _, expected = by_loops(attention, queries, source, mask)
    if output:
        expected = attention.output(expected)
    out = attention(queries, source if crossed else None, mask)
    torch.testing.assert_close(out, expected)


def test_a_hook_reads_the_probabilities_of_the_explicit_path():
    attention = layer(fused=False, output=False)
    queries, source = states(2, 3), states(2, 4)
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    taken = []
    attention.probabilities.register_forward_hook(lambda _, __, x: taken.append(x))
    attention(queries, source, mask)
    expected, _ = by_loops(attention, queries, source, mask)
    torch.testing.assert_close(taken, [expected])


def test_value_encodings_see_what_the_hook_gave():
    class Seen(PositionEncoding):
        def value(self, attention, context):
            self.seen = attention
            return torch.zeros(*attention.shape[:3], WIDTH // HEADS, dtype=attention.dtype)

    encoding = Seen()
    attention = layer(fused=True, positions=[encoding])  # the value hook forbids fusing
    attention.probabilities.register_forward_hook(lambda _, __, x: x.zero_())
    attention(states(1, 3))
    assert encoding.seen.shape == (1, HEADS, 3, 3)
    assert encoding.seen.eq(0).all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_row_without_keys_gives_a_mean_where_logits_are_low(dtype, fused):
    class Low(PositionEncoding):
        def bias(self, query, key, context):
            return torch.full((), -100, dtype=query.dtype)

    query = torch.full((1, 1, 2, 8), 6, dtype=dtype)
    value = torch.arange(3, dtype=dtype)[:, None].expand(1, 1, 3, 8)
    nothing = mask_bias(torch.zeros(1, 1, 1, 3, dtype=torch.bool), dtype)
    for encodings in ([], [Low()]):
        out = attend(
            query, -query[:, :, :1].expand_as(value), value, encodings, None, nothing, fused
        )
        torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_masks_bias_is_bit_by_bit_nothing_or_the_lowest_number(dtype):
    mask = torch.rand(3, 30) < 0.5
    plain = torch.zeros(3, 30, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    bias = mask_bias(mask, dtype)
    assert bias.dtype == dtype
    assert torch.equal(bias.view(torch.uint8), plain.view(torch.uint8))  # also the sign of 0


def test_encodings_of_tokens_are_refused():
    encoding = create_position("learned-1d", width=WIDTH, length=6)
    with pytest.raises(ValueError, match="LearnedPosition acts on tokens"):
        layer(positions=[encoding])


@pytest.mark.parametrize("kind", [Attention, CausalAttention])
@pytest.mark.parametrize("name", ["irpe-product", "rope-axial"])
def test_without_a_context_attention_compiles_into_one_graph(kind, name):
    encoding = create_position(name, width=WIDTH, heads=HEADS, grid=(2, 3))
    attention, x = kind(WIDTH, HEADS, positions=[encoding]).double(), states(2, 6)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), attention(x, context=CONTEXT))
    encoding.grid = None
    with pytest.raises(ValueError, match=f"{name} needs a grid"):
        attention(x)


def causal(*names):
    encodings = [create_position(name, width=WIDTH, heads=HEADS) for name in names]
    return CausalAttention(WIDTH, HEADS, encodings).double()


def test_causal_attention_equals_loops():
    x = states(2, 6)
    positions = create_position("alibi-2d", heads=HEADS)
    plain, biased = causal(), CausalAttention(WIDTH, HEADS, [positions]).double()
    for attention, bias in ((plain, None), (biased, distance_bias(*GRID, HEADS))):
        expected = attention.output(by_loops(attention, x, x, bias=bias)[1])
        torch.testing.assert_close(attention(x, CONTEXT), expected)
    fused, both = causal("rope-axial"), causal("rope-axial", "irpe-cross")
    both.load_state_dict(fused.state_dict(), strict=False)  # iRPE's tables start at zero
    torch.testing.assert_close(fused(x, CONTEXT), both(x, CONTEXT))


def test_what_causal_attention_cannot_take_is_named():
    with pytest.raises(ValueError, match="3 heads do not divide width 8"):
        CausalAttention(WIDTH, 3)
    with pytest.raises(ValueError, match="LearnedPosition acts on tokens"):
        CausalAttention(WIDTH, HEADS, [create_position("learned-1d", width=WIDTH, length=6)])
    with pytest.raises(ValueError, match="2 tokens and 0 encodings"):
        causal()(states(2, 2), past=Past())
    with pytest.raises(ValueError, match="1 tokens and 1 encodings"):
        causal("irpe-cross")(states(2, 1), CONTEXT, Past())
