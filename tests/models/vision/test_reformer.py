"""Reformer's attention and layer against loops over tokens."""

from __future__ import annotations

import pytest
import torch

from vlp.layers.causal import Past
from vlp.positions.base import PositionContext
from vlp.tasks.pixels.model import ReformerLayer, SharedQueryAttention

WIDTH, HEADS, HEAD_WIDTH = 6, 2, 5


def attention_by_loop(attention, states):
    """Kitaev et al., section 2: k = q / |q|, and no token attends to itself if it can help it."""
    out = torch.zeros_like(states)
    for row, sequence in enumerate(states):
        for place in range(len(sequence)):
            parts = []
            for head in range(HEADS):
                rows = slice(head * HEAD_WIDTH, (head + 1) * HEAD_WIDTH)
                query = sequence @ attention.query.weight[rows].T
                value = sequence @ attention.value.weight[rows].T
                seen = range(place) if place else [0]
                logits = [query[place] @ query[one] / query[one].norm() for one in seen]
                shares = torch.stack(logits).softmax(0)
                parts.append(sum(share * value[one] for share, one in zip(shares, seen)))
            out[row, place] = attention.output.weight @ torch.cat(parts)
    return out


@pytest.mark.parametrize("length", [1, 2, 7])
def test_attention_is_that_of_a_loop(length):
    attention = SharedQueryAttention(WIDTH, HEADS, HEAD_WIDTH).double()
    states = torch.randn(3, length, WIDTH, dtype=torch.float64)
    expected = attention_by_loop(attention, states)
    torch.testing.assert_close(attention(states), expected)
    past = Past()
    steps = [attention(states[:, place : place + 1], past) for place in range(length)]
    torch.testing.assert_close(torch.cat(steps, 1), expected)


def test_a_layer_can_be_undone():
    """What reversible layers are: their input follows from their output."""
    layer = ReformerLayer(WIDTH, HEADS, HEAD_WIDTH, 8).double()
    x = torch.randn(2, 5, 2 * WIDTH, dtype=torch.float64)
    first, second = layer(x, PositionContext()).chunk(2, -1)
    second = second - layer.feed_forward(layer.feed_forward_norm(first))
    first = first - layer.attention(layer.attention_norm(second))
    torch.testing.assert_close(torch.cat([first, second], -1), x)
