"""Dispatch by stream: each side's own encoding, and nothing where a side has none."""

from __future__ import annotations

import pytest
import torch

from vlp.layers.attention import Attention
from vlp.positions import ByModality, PositionContext, PositionEncoding, create_position

WIDTH, HEADS = 8, 2
TEXT = PositionContext(grid=(1, 6), prefix_tokens=1, text_queries=True)
IMAGE = PositionContext(grid=(2, 3), prefix_tokens=1, text_queries=False)


class Marked(PositionEncoding):
    """Every hook leaves its own trace."""

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


def filled(name, **options):
    position = create_position(name, width=WIDTH, heads=HEADS, **options)
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)
    return position


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


def test_tables_are_not_shared_and_both_are_trained():
    text = filled("irpe-product", roles=("query", "key", "value"))
    image = filled("irpe-product", roles=("query", "key", "value"))
    both = ByModality(text, image)
    names = {name for name, _ in both.named_parameters()}
    assert names == {
        f"{side}.tables.{role}" for side in ("text", "image") for role in ("query", "key", "value")
    }
    shared = Attention(WIDTH, HEADS, positions=[both])
    x = torch.randn(2, 7, WIDTH)
    for context, own, foreign in ((TEXT, text, image), (IMAGE, image, text)):
        alone = Attention(WIDTH, HEADS, positions=[own])
        weights = {k: v for k, v in shared.state_dict().items() if not k.startswith("positions")}
        alone.load_state_dict(weights | own.state_dict(prefix="positions.0."))
        shared.zero_grad()
        out = shared(x, context=context)
        assert torch.equal(out, alone(x, context=context))
        out.square().sum().backward()
        assert all(table.grad.abs().sum() > 0 for table in own.parameters())
        assert all(table.grad is None for table in foreign.parameters())
