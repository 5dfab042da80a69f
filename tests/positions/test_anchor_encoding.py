"""ACE-RPE inside cross-attention against Eqs 8-12 with the (M, N, D) tensor built."""

from __future__ import annotations

import pytest
import torch

from vlp.layers.attention import Attention
from vlp.positions import PositionContext, create_position, list_positions
from vlp.positions.anchor import embed_path
from vlp.positions.anchor_field import anchor_field, uniform_field

WIDTH, HEADS, GROUPS, GRID = 8, 2, 2, (2, 3)


@pytest.fixture
def field():
    image, text = torch.randn(3, 6, 4).double(), torch.randn(3, 5, 4).double()
    words = torch.tensor([[False, True, True, True, False]] * 2 + [[False, True] + [False] * 3])
    return anchor_field(image, text, words, GRID, 0.05, GROUPS), words


def attention_with(position):
    layer = Attention(WIDTH, HEADS, output=False, positions=[position]).double()
    for name, parameter in position.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        assert "table" in name
    return layer


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


@pytest.mark.parametrize("text_queries", [True, False])
@pytest.mark.parametrize("roles", [("query", "key", "value"), ("query",), ("value",), ("key",)])
def test_contextual_mode_is_equations_10_to_12(field, text_queries, roles):
    field, words = field
    position = create_position("anchor", width=WIDTH, heads=HEADS, groups=GROUPS, roles=roles)
    layer = attention_with(position)
    text, image = torch.randn(3, 5, WIDTH).double(), torch.randn(3, 7, WIDTH).double()
    mask = torch.tensor([[True] * 5, [True] * 4 + [False], [True] * 3 + [False] * 2])
    queries, keys, key_mask = (text, image, None) if text_queries else (image, text, mask)
    out = layer(queries, keys, key_mask, PositionContext(anchors=field, text_queries=text_queries))

    def added(role, side):
        if role not in roles:
            return 0
        embedded = embed_path(field.path, position.tables[role])  # (B, 1 + M, N, D)
        if side == "text":
            return embedded[:, 1:].mean(1)
        return embedded.sum(2) / words.sum(-1).clamp(min=1)[:, None, None]

    asking, answering = ("text", "image") if text_queries else ("image", "text")
    query = heads(layer.query(queries + added("query", asking)))
    key = heads(layer.key(keys + added("key", answering)))
    value = heads(layer.value(keys + added("value", answering)))
    logits = query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
    if key_mask is not None:
        logits = logits.masked_fill(~key_mask[:, None, None, :], -1e300)
    weights = logits.softmax(-1)
    expected = weights @ value
    if "value" in roles:
        embedded = embed_path(field.path, position.tables["value"])
        if text_queries:
            embedded = embedded.transpose(1, 2)  # (B, Q, K, D)
        per_head = embedded.unflatten(-1, (HEADS, -1))
        expected = expected + torch.einsum("bhqk,bqkhd->bhqd", weights, per_head)
    torch.testing.assert_close(out, expected.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("text_queries", [True, False])
def test_bias_mode_is_equation_9(field, text_queries):
    field, _ = field
    position = create_position("anchor", width=WIDTH, heads=HEADS, groups=GROUPS, mode="bias")
    layer = attention_with(position)
    text, image = torch.randn(3, 5, WIDTH).double(), torch.randn(3, 7, WIDTH).double()
    queries, keys = (text, image) if text_queries else (image, text)
    context = PositionContext(anchors=field, text_queries=text_queries)
    embedded = embed_path(field.path, position.table).unflatten(-1, (HEADS, -1))
    bias = torch.einsum("bmnhd,hd->bhmn", embedded, position.bias_table)
    if text_queries:
        bias = bias.transpose(-1, -2)
    query, key = heads(layer.query(queries)), heads(layer.key(keys))
    logits = (query @ key.transpose(-1, -2) + bias) / (WIDTH // HEADS) ** 0.5
    expected = (logits.softmax(-1) @ heads(layer.value(keys))).transpose(1, 2).flatten(-2)
    for fused in (False, True):
        layer.fused = fused
        torch.testing.assert_close(layer(queries, keys, None, context), expected)


def test_zero_tables_change_nothing(field):
    field, _ = field
    plain = Attention(WIDTH, HEADS, output=False).double()
    layer = Attention(
        WIDTH,
        HEADS,
        output=False,
        positions=[create_position("anchor", width=WIDTH, heads=HEADS, groups=GROUPS)],
    ).double()
    layer.load_state_dict(plain.state_dict(), strict=False)
    text, image = torch.randn(3, 5, WIDTH).double(), torch.randn(3, 7, WIDTH).double()
    context = PositionContext(anchors=field)
    assert torch.equal(layer(text, image, None, context), plain(text, image, None, context))


def test_class_tokens_and_padding_have_no_position(field):
    field, words = field
    assert field.path[:, 0].eq(0).all()
    assert field.image_mean[:, 0].eq(0).all()
    assert field.path.transpose(1, 2)[~words].eq(0).all()
    assert field.text_mean[~words].eq(0).all()
    uniform = uniform_field(words, 6, GROUPS)
    assert uniform.path[:, 1:].transpose(1, 2)[words].eq(1).all()
    assert uniform.path.sum() == words.sum() * 6 * GROUPS


def test_unknown_names_are_answered_with_the_known_ones():
    assert "anchor" in list_positions()
    with pytest.raises(ValueError, match=r"'anker'; known: .*anchor"):
        create_position("anker")


def test_missing_paths_are_an_error():
    layer = attention_with(create_position("anchor", width=WIDTH, heads=HEADS))
    with pytest.raises(ValueError, match="needs anchor paths"):
        layer(torch.rand(1, 2, WIDTH).double(), None, None, PositionContext())
