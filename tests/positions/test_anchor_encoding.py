"""ACE-RPE inside cross-attention against Eqs 8-12 with the (M, N, D) tensor built."""

from __future__ import annotations

import pytest
import torch

from vlp.layers.attention import Attention
from vlp.positions import PositionContext, create_position, list_positions
from vlp.positions.anchor import embed_path
from vlp.positions.anchor_field import PathSettings, anchor_field, uniform_field

WIDTH, HEADS, GROUPS, GRID = 8, 2, 2, (2, 3)


@pytest.fixture
def field():
    image, text = torch.randn(3, 6, 4).double(), torch.randn(3, 5, 4).double()
    words = torch.tensor([[False, True, True, True, False]] * 2 + [[False, True] + [False] * 3])
    return anchor_field(image, text, words, PathSettings(GRID, 0.05, GROUPS)), words


def attention_with(position):
    layer = Attention(WIDTH, HEADS, output=False, positions=[position]).double()
    for name, parameter in position.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        assert "table" in name
    return layer


@pytest.mark.parametrize("gradient", [False, True])
def test_far_lengthens_the_paths_of_words_without_an_anchor_in_reach_alone(gradient):
    image, text = torch.randn(3, 6, 4).double(), torch.randn(3, 5, 4).double()
    image.requires_grad_(gradient)
    words = torch.tensor([[False, True, True, True, False]] * 2 + [[False, True] + [False] * 3])
    settings = PathSettings(GRID, torch.tensor(0.8).double(), GROUPS, text_window=3, patch_window=1)
    zero = anchor_field(image, text, words, settings)
    far = anchor_field(image, text, words, settings._replace(unreachable="far"))
    lost = words[:, None, :, None] & ~zero.reachable
    assert lost.any()
    assert not lost.all()
    expected = zero.path[:, 1:].masked_fill(lost, 1 / 0.8 + 1)  # a window of 3 tokens, 1 patch
    torch.testing.assert_close(far.path[:, 1:], expected)
    assert (far.path[:, 0] == 0).all()
    assert torch.equal(far.text_path, far.path.transpose(1, 2))
    torch.testing.assert_close(far.text_mean, expected.mean(1))
    by_word = expected.sum(2) / words.sum(-1).clamp(min=1)[:, None, None]
    torch.testing.assert_close(far.image_mean[:, 1:], by_word)
    if gradient:  # of anchors alone
        (zero_gradient,) = torch.autograd.grad(zero.path.sum(), image)
        (far_gradient,) = torch.autograd.grad(far.path.sum(), image)
        torch.testing.assert_close(far_gradient, zero_gradient)


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("text_queries", [True, False])
@pytest.mark.parametrize("roles", [("query", "key", "value"), ("query",), ("value",), ("key",)])
def test_contextual_mode_is_equations_10_to_12(field, text_queries, roles, pooled):
    field, words = field
    options = {"width": WIDTH, "heads": HEADS, "groups": GROUPS}
    position = create_position("anchor", **options, roles=roles, value_pooled=pooled)
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
    value = heads(layer.value(keys + (added("value", answering) if pooled else 0)))
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


def paths_of(rows):
    image, text = torch.randn(rows, 6, 4).double(), torch.randn(rows, 5, 4).double()
    words = (torch.arange(5) > 0) & (torch.arange(5) < torch.randint(1, 6, (rows, 1)))
    return anchor_field(image, text, words, PathSettings(GRID, 0.05, GROUPS)), words


def tiled(path, table, scale):
    """E with the channels of every head, (B, 1 + M, N, WIDTH): one head's table again and again."""
    embedded = embed_path(scale * path, table)
    return embedded.repeat(1, 1, 1, WIDTH // embedded.shape[-1])


@pytest.mark.parametrize("text_queries", [True, False])
@pytest.mark.parametrize(("shared", "scale"), [(True, 1.0), (False, 0.25), (True, 3.0)])
def test_shared_heads_and_scale_in_contextual_mode(shared, scale, text_queries):
    rows = 2
    field, words = paths_of(rows)
    options = {"width": WIDTH, "heads": HEADS, "groups": GROUPS}
    position = create_position("anchor", **options, shared_heads=shared, scale=scale)
    layer = attention_with(position)
    assert position.tables["key"].shape == (GROUPS, WIDTH // HEADS if shared else WIDTH)
    text, image = torch.randn(rows, 5, WIDTH).double(), torch.randn(rows, 7, WIDTH).double()
    asking, answering = (text, image) if text_queries else (image, text)
    out = layer(asking, answering, None, PositionContext(anchors=field, text_queries=text_queries))

    embedded = {role: tiled(field.path, position.tables[role], scale) for role in position.tables}
    if text_queries:  # (B, Q, K, D) and means over the side that counts
        embedded = {role: e.transpose(1, 2) for role, e in embedded.items()}
    count = words.sum(-1).clamp(min=1)[:, None, None]
    mean_of_keys = lambda e: e.sum(2) / (6 if text_queries else count)  # noqa: E731
    mean_of_queries = lambda e: e.sum(1) / (count if text_queries else 6)  # noqa: E731
    query = heads(layer.query(asking + mean_of_keys(embedded["query"])))
    key = heads(layer.key(answering + mean_of_queries(embedded["key"])))
    value = heads(layer.value(answering + mean_of_queries(embedded["value"])))
    weights = (query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).softmax(-1)
    per_head = embedded["value"].unflatten(-1, (HEADS, -1))
    expected = weights @ value + torch.einsum("bhqk,bqkhd->bhqd", weights, per_head)
    torch.testing.assert_close(out, expected.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("text_queries", [True, False])
@pytest.mark.parametrize(("shared", "scale"), [(True, 1.0), (False, 0.25), (True, 3.0)])
def test_shared_heads_and_scale_in_bias_mode(shared, scale, text_queries):
    field, _ = paths_of(3)
    options = {"width": WIDTH, "heads": HEADS, "groups": GROUPS, "mode": "bias"}
    position = create_position("anchor", **options, shared_heads=shared, scale=scale)
    attention_with(position)  # draws the tables
    assert position.bias_table.shape == (1 if shared else HEADS, WIDTH // HEADS)
    context = PositionContext(anchors=field, text_queries=text_queries)
    query = torch.randn(3, HEADS, 5 if text_queries else 7, WIDTH // HEADS).double()
    embedded = tiled(field.path, position.table, scale).unflatten(-1, (HEADS, -1))
    vectors = position.bias_table.expand(HEADS, -1)
    expected = torch.einsum("bmnhd,hd->bhmn", embedded, vectors) / (WIDTH // HEADS) ** 0.5
    if text_queries:
        expected = expected.transpose(-1, -2)
    torch.testing.assert_close(position("bias", query, query, context), expected)


def test_tables_and_states_learn_as_in_plain_attention_over_shifted_states():
    rows = 2
    field, _ = paths_of(rows)
    text, image = torch.randn(rows, 5, WIDTH).double(), torch.randn(rows, 7, WIDTH).double()
    layer = attention_with(
        create_position("anchor", width=WIDTH, heads=HEADS, groups=GROUPS, roles=("query", "key"))
    )
    image.requires_grad_()
    layer(text, image, None, PositionContext(anchors=field)).square().sum().backward()
    (position,) = layer.positions
    found = [*(position.tables[role].grad for role in ("query", "key")), layer.key.weight.grad]
    found.append(image.grad)

    plain = Attention(WIDTH, HEADS, output=False).double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    tables = [position.tables[role].detach().requires_grad_() for role in ("query", "key")]
    other = image.detach().requires_grad_()
    query = heads(plain.query(text + field.text_mean @ tables[0]))
    key = heads(plain.key(other + field.image_mean @ tables[1]))
    weights = (query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).softmax(-1)
    (weights @ heads(plain.value(other))).square().sum().backward()
    for one, another in zip(found, [*(t.grad for t in tables), plain.key.weight.grad, other.grad]):
        torch.testing.assert_close(one, another)


def test_both_orders_of_the_paths_hold_the_same_and_know_what_is_reachable(field):
    field, words = field
    assert torch.equal(field.path.transpose(1, 2), field.text_path)
    assert field.text_path.transpose(-1, -2).is_contiguous()
    assert field.path.transpose(-1, -2).is_contiguous()
    assert torch.equal(field.reachable, field.path[:, 1:] != 0)
    assert not field.reachable.transpose(1, 2)[~words].any()
    assert 0 < field.reachable.float().mean() < 1
    assert field.path[:, 1:][field.reachable].ge(1).all()
    uniform = uniform_field(words, 6, GROUPS)
    assert torch.equal(uniform.reachable, words[:, None, :, None].expand_as(uniform.reachable))


def test_half_precision_comes_after_the_path():
    image, text = torch.randn(3, 6, 4), torch.randn(3, 5, 4)
    words = torch.ones(3, 5, dtype=torch.bool)
    exact = anchor_field(image, text, words, PathSettings(GRID, 0.05, GROUPS))
    with torch.autocast("cpu", torch.bfloat16):
        half = anchor_field(image, text, words, PathSettings(GRID, 0.05, GROUPS))
    assert half.similarity.dtype == torch.float32
    for name in ("path", "text_path", "image_mean", "text_mean"):
        assert torch.equal(getattr(half, name), getattr(exact, name).bfloat16())
