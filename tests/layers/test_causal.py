"""Causal attention against loops, with encodings, and token by token."""

from __future__ import annotations

import math

import pytest
import torch

from vlp.layers.causal import CausalAttention, Past
from vlp.positions import create_position
from vlp.positions.alibi2d import bias
from vlp.positions.base import PositionContext

WIDTH, HEADS, GRID = 8, 2, (2, 3)
CONTEXT = PositionContext(grid=GRID)


def layer(*names, **options):
    encodings = [create_position(name, **options) for name in names]
    return CausalAttention(WIDTH, HEADS, encodings).double()


def states(tokens=6, rows=2):
    return torch.randn(rows, tokens, WIDTH, dtype=torch.float64)


@torch.no_grad()
def by_loops(attention, x, addition=None):
    size = WIDTH // HEADS
    query, key, value = attention.query(x), attention.key(x), attention.value(x)
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            for q in range(x.shape[1]):
                logits = [
                    float(query[row, q, part] @ key[row, k, part]) / math.sqrt(size)
                    + (0.0 if addition is None else float(addition[head, q, k]))
                    for k in range(q + 1)
                ]
                share = torch.tensor(logits, dtype=torch.float64).softmax(0)
                out[row, q, part] = share @ value[row, : q + 1, part]
    return attention.output(out)


def test_plain_and_biased_attention_equal_loops():
    x = states()
    plain, biased = layer(), layer("alibi-2d", heads=HEADS)
    torch.testing.assert_close(plain(x), by_loops(plain, x))
    torch.testing.assert_close(biased(x, CONTEXT), by_loops(biased, x, bias(*GRID, HEADS)))


def test_the_fused_and_the_explicit_path_agree():
    x = states()
    fused = layer("rope-axial", width=WIDTH, heads=HEADS)
    both = layer("rope-axial", width=WIDTH, heads=HEADS)
    both.positions.append(create_position("irpe-cross", width=WIDTH, heads=HEADS).double())
    both.load_state_dict(fused.state_dict(), strict=False)  # iRPE's tables start at zero
    torch.testing.assert_close(fused(x, CONTEXT), both(x, CONTEXT))


@pytest.mark.parametrize("names", [(), ("alibi-2d",)])
def test_a_scale_of_ones_own(names):
    options = {"heads": HEADS} if names else {}
    scaled, plain = layer(*names, **options), layer(*names, **options)
    scaled.scale = 1.0
    plain.load_state_dict(scaled.state_dict())
    with torch.no_grad():
        plain.query.weight *= (WIDTH // HEADS) ** 0.5
        plain.query.bias *= (WIDTH // HEADS) ** 0.5
    x, past = states(), Past()
    expected = plain(x, CONTEXT)
    torch.testing.assert_close(scaled(x, CONTEXT), expected)
    if not names:
        found = torch.cat([scaled(one, past=past) for one in x.split(1, 1)], 1)
        torch.testing.assert_close(found, expected)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="3 heads do not divide width 8"):
        CausalAttention(WIDTH, 3)
    with pytest.raises(ValueError, match="LearnedPosition acts on tokens"):
        layer("learned-1d", width=WIDTH, length=6)
    with pytest.raises(ValueError, match="2 tokens and 0 encodings"):
        layer()(states(2), past=Past())
    with pytest.raises(ValueError, match="1 tokens and 1 encodings"):
        layer("alibi-2d", heads=HEADS)(states(1), CONTEXT, Past())
