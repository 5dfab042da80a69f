"""Attention against loops, and its probabilities within reach of a hook."""

from __future__ import annotations

import math

import pytest
import torch

from vlp.layers.attention import Attention, attend, mask_bias
from vlp.layers.causal import CausalAttention
from vlp.positions import create_position
from vlp.positions.base import PositionContext, PositionEncoding

WIDTH, HEADS = 8, 2


def layer(**options):
    return Attention(WIDTH, HEADS, **options).double()


def states(rows, tokens):
    return torch.randn(rows, tokens, WIDTH, dtype=torch.float64)


@torch.no_grad()
def by_loops(attention, queries, source, mask):
    """Probabilities (B, heads, Q, K) and the output before the output projection."""
    query, key, value = (
        getattr(attention, name)(x)
        for name, x in (("query", queries), ("key", source), ("value", source))
    )
    size = WIDTH // HEADS
    weights = torch.zeros(len(query), HEADS, query.shape[1], key.shape[1], dtype=torch.float64)
    out = torch.zeros_like(query)
    for row in range(len(query)):
        keys = [k for k in range(key.shape[1]) if mask is None or mask[row, k]]
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            for q in range(query.shape[1]):
                logits = [float(query[row, q, part] @ key[row, k, part]) for k in keys]
                strength = [math.exp(logit / math.sqrt(size)) for logit in logits]
                for k, one in zip(keys, strength):
                    weights[row, head, q, k] = one / sum(strength)
                    out[row, q, part] += one / sum(strength) * value[row, k, part]
    return weights, out


@pytest.mark.parametrize("fused", [False, True])
@torch.no_grad()
def test_a_scale_of_ones_own(fused):
    """As with queries that are so much larger, whose bias keeps its size."""
    encoding = create_position("irpe-product", width=WIDTH, heads=HEADS, mode="bias").double()
    torch.nn.init.normal_(encoding.tables["key"])
    query, key, value = torch.randn(3, 2, HEADS, 6, WIDTH // HEADS, dtype=torch.float64)
    context = PositionContext((2, 3))
    given = (key, value, [encoding], context)
    larger = attend(query * (WIDTH // HEADS) ** 0.5, *given)
    torch.testing.assert_close(attend(query, *given, fused=fused, scale=1.0), larger)
    scaled = layer(scale=0.25, positions=[encoding], fused=fused)
    plain = layer(positions=[encoding])
    plain.load_state_dict(scaled.state_dict())
    plain.query.weight *= 0.25 * (WIDTH // HEADS) ** 0.5
    plain.query.bias *= 0.25 * (WIDTH // HEADS) ** 0.5
    x = states(2, 6)
    torch.testing.assert_close(scaled(x, context=context), plain(x, context=context))


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


def test_a_hook_replaces_the_probabilities():
    attention = layer(fused=False, output=False)
    attention.probabilities.register_forward_hook(lambda _, __, x: torch.full_like(x, 0.25))
    source = states(2, 4)
    out = attention(states(2, 3), source)
    mean = attention.value(source).mean(1, keepdim=True)
    torch.testing.assert_close(out, mean.expand(-1, 3, -1))


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


def test_under_autocast_probabilities_have_the_type_of_the_values():
    attention = Attention(WIDTH, HEADS, fused=False)
    taken = []
    attention.probabilities.register_forward_hook(lambda _, __, x: taken.append(x))
    x = states(2, 3).float()
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(x)
    assert taken[0].dtype == out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), attention(x), atol=0.03, rtol=0.03)


def test_encodings_of_tokens_are_refused():
    encoding = create_position("learned-1d", width=WIDTH, length=6)
    with pytest.raises(ValueError, match="LearnedPosition acts on tokens"):
        layer(positions=[encoding])


@pytest.mark.parametrize("kind", [Attention, CausalAttention])
@pytest.mark.parametrize("name", ["irpe-product", "rope-axial"])
def test_encodings_that_know_their_grid_need_no_context(kind, name):
    encoding = create_position(name, width=WIDTH, heads=HEADS, grid=(2, 3))
    attention, x = kind(WIDTH, HEADS, positions=[encoding]).double(), states(2, 6)
    assert torch.equal(attention(x), attention(x, context=PositionContext((2, 3))))
    attention.positions[0] = create_position(name, width=WIDTH, heads=HEADS).double()
    with pytest.raises(ValueError, match=f"{name} needs a grid"):
        attention(x)


def test_without_a_context_attention_compiles_into_one_graph():
    encoding = create_position("irpe-product", width=WIDTH, heads=HEADS, grid=(2, 3))
    attention, x = layer(positions=[encoding]), states(2, 6)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), attention(x))
