import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cosine_similarity

from vlp.layers.attention import Attention
from vlp.positions import PositionContext, create_position
from vlp.positions.anchor_field import PathSettings, compute_paths, join_paths, uniform_paths

WIDTH, HEADS, GROUPS, GRID = 8, 2, 2, (2, 3)
WORDS = torch.tensor([[False, True, True, True, False]] * 2 + [[False, True] + [False] * 3])
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "add-ace-rpe.md"
both_streams = pytest.mark.parametrize("text_queries", [True, False])


def features():
    return torch.randn(3, 6, 4).double(), torch.randn(3, 5, 4).double()


def field_of(image, text):
    return compute_paths(image, text, WORDS, PathSettings(GRID, 0.05, GROUPS))


@pytest.fixture
def field():
    return field_of(*features())


def streams():
    return torch.randn(3, 5, WIDTH).double(), torch.randn(3, 7, WIDTH).double()


def attention_with(position):
    layer = Attention(WIDTH, HEADS, output=False, positions=[position]).double()
    for name, parameter in position.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        assert "table" in name
    return layer


@pytest.mark.parametrize("gradient", [False, True])
def test_far_lengthens_the_paths_of_words_without_an_anchor_in_reach_alone(gradient):
    image, text = features()
    image.requires_grad_(gradient)
    settings = PathSettings(GRID, torch.tensor(0.8).double(), GROUPS, text_window=3, patch_window=1)
    zero = compute_paths(image, text, WORDS, settings)
    far = compute_paths(image, text, WORDS, settings._replace(unreachable="far"))
    lost = WORDS[:, None, :, None] & ~zero.reachable
    assert lost.any()
    assert not lost.all()
    # A window of 3 tokens and 1 patch.
    expected = zero.image_path[:, 1:].masked_fill(lost, 1 / 0.8 + 1)
    torch.testing.assert_close(far.image_path[:, 1:], expected)
    assert (far.image_path[:, 0] == 0).all()
    assert torch.equal(far.text_path, far.image_path.transpose(1, 2))
    torch.testing.assert_close(far.text_mean, expected.mean(1))
    by_word = expected.sum(2) / WORDS.sum(-1).clamp(min=1)[:, None, None]
    torch.testing.assert_close(far.image_mean[:, 1:], by_word)
    if gradient:  # of anchors alone
        (zero_gradient,) = torch.autograd.grad(zero.image_path.sum(), image)
        (far_gradient,) = torch.autograd.grad(far.image_path.sum(), image)
        torch.testing.assert_close(far_gradient, zero_gradient)


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def anchor(**options):
    return create_position("anchor", width=WIDTH, heads=HEADS, groups=GROUPS, **options)


def embedded(path, table, scale):
    one = scale * path @ table
    return one.repeat(1, 1, 1, WIDTH // one.shape[-1])


ALL = ("query", "key", "value")


@both_streams
@pytest.mark.parametrize(
    ("roles", "pooled", "shared", "scale"),
    [
        *((roles, True, False, 1.0) for roles in (ALL, ("query",), ("value",), ("key",))),
        *((roles, False, False, 1.0) for roles in (ALL, ("value",))),
        *((ALL, True, True, scale) for scale in (1.0, 3.0)),
        (ALL, True, False, 0.25),
    ],
)
def test_contextual_mode_is_equations_10_to_12(field, text_queries, roles, pooled, shared, scale):
    position = anchor(roles=roles, value_pooled=pooled, shared_heads=shared, scale=scale)
    layer = attention_with(position)
    for table in position.tables.values():
        assert table.shape == (GROUPS, WIDTH // HEADS if shared else WIDTH)
    text, image = streams()
    mask = torch.tensor([[True] * 5, [True] * 4 + [False], [True] * 3 + [False] * 2])
    queries, keys, key_mask = (text, image, None) if text_queries else (image, text, mask)
    out = layer(queries, keys, key_mask, PositionContext(anchors=field, text_queries=text_queries))

    def added(role, side):
        if role not in roles:
            return 0
        vectors = embedded(field.image_path, position.tables[role], scale)  # (B, 1 + M, N, D)
        if side == "text":
            return vectors[:, 1:].mean(1)
        return vectors.sum(2) / WORDS.sum(-1).clamp(min=1)[:, None, None]

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
        vectors = embedded(field.image_path, position.tables["value"], scale)
        if text_queries:
            vectors = vectors.transpose(1, 2)  # (B, Q, K, D)
        per_head = vectors.unflatten(-1, (HEADS, -1))
        expected = expected + torch.einsum("bhqk,bqkhd->bhqd", weights, per_head)
    torch.testing.assert_close(out, expected.transpose(1, 2).flatten(-2))


@both_streams
@pytest.mark.parametrize(("shared", "scale"), [(False, 1.0), (True, 1.0), (False, 0.25)])
def test_bias_mode_is_equation_9(field, text_queries, shared, scale):
    position = anchor(mode="bias", shared_heads=shared, scale=scale)
    layer = attention_with(position)
    assert position.bias_table.shape == (1 if shared else HEADS, WIDTH // HEADS)
    text, image = streams()
    queries, keys = (text, image) if text_queries else (image, text)
    context = PositionContext(anchors=field, text_queries=text_queries)
    vectors = embedded(field.image_path, position.table, scale).unflatten(-1, (HEADS, -1))
    bias = torch.einsum("bmnhd,hd->bhmn", vectors, position.bias_table.expand(HEADS, -1))
    if text_queries:
        bias = bias.transpose(-1, -2)
    query, key = heads(layer.query(queries)), heads(layer.key(keys))
    logits = (query @ key.transpose(-1, -2) + bias) / (WIDTH // HEADS) ** 0.5
    expected = (logits.softmax(-1) @ heads(layer.value(keys))).transpose(1, 2).flatten(-2)
    for fused in (False, True):
        layer.fused = fused
        torch.testing.assert_close(layer(queries, keys, None, context), expected)


@pytest.mark.parametrize("mode", ["contextual", "bias"])
def test_zero_tables_change_nothing(field, mode):
    plain = Attention(WIDTH, HEADS, output=False).double()
    layer = Attention(WIDTH, HEADS, output=False, positions=[anchor(mode=mode)], fused=False)
    layer.double().load_state_dict(plain.state_dict(), strict=False)
    text, image = streams()
    plain.fused = False
    context = PositionContext(anchors=field)
    assert torch.equal(layer(text, image, None, context), plain(text, image, None, context))


def test_missing_paths_are_an_error():
    layer = attention_with(anchor())
    with pytest.raises(ValueError, match="needs anchor paths"):
        layer(torch.rand(1, 2, WIDTH).double(), None, None, PositionContext())


def test_tables_and_states_learn_as_in_plain_attention_over_shifted_states(field):
    text, image = streams()
    layer = attention_with(anchor(roles=("query", "key")))
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
    expected = [*(table.grad for table in tables), plain.key.weight.grad, other.grad]
    torch.testing.assert_close(found, expected)


def test_both_orders_of_the_paths_hold_the_same_and_know_what_is_reachable(field):
    assert torch.equal(field.image_path.transpose(1, 2), field.text_path)
    assert field.text_path.transpose(-1, -2).is_contiguous()
    assert field.image_path.transpose(-1, -2).is_contiguous()
    assert torch.equal(field.reachable, field.image_path[:, 1:] != 0)
    # [CLS], [SEP] and padding have no position.
    for positions in (field.image_path[:, 0], field.image_mean[:, 0]):
        assert not positions.any()
    assert not field.text_path[~WORDS].any()
    assert not field.text_mean[~WORDS].any()
    assert 0 < field.reachable.float().mean() < 1
    assert field.image_path[:, 1:][field.reachable].ge(1).all()
    uniform = uniform_paths(WORDS, 6, GROUPS)
    assert torch.equal(uniform.reachable, WORDS[:, None, :, None].expand_as(uniform.reachable))
    assert torch.equal(uniform.image_path[:, 1:], uniform.reachable.float())
    assert not uniform.image_path[:, 0].any()


def test_half_precision_comes_after_the_path():
    inputs = [x.float() for x in features()]
    exact = field_of(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        half = field_of(*inputs)
    assert half.similarity.dtype == torch.float32
    for name in ("image_path", "text_path", "image_mean", "text_mean"):
        assert torch.equal(getattr(half, name), getattr(exact, name).bfloat16())


def test_the_pages_attention_starts_as_a_plain_one_and_follows_its_paths():
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    names = {}
    exec(block, names)
    attention, words, patches = names["attention"], names["words"], names["patches"]
    assert names["out"].shape == (2, 12, 256)
    plain = type(attention)(256, 8)
    plain.load_state_dict({k: v for k, v in attention.state_dict().items() if "position" not in k})
    torch.testing.assert_close(names["out"], plain(words, patches))
    torch.nn.init.normal_(names["ace"].tables["value"])
    context = names["PositionContext"](names["grid"], 1, anchors=names["paths"], text_queries=True)
    assert not torch.allclose(attention(words, patches, context=context), names["out"], atol=1e-3)


def alignment(factors):
    position = create_position("alignment", heads=HEADS).double()
    with torch.no_grad():
        position.factors.copy_(torch.tensor(factors))
    return position


@both_streams
def test_alignment_adds_the_mean_cosine_of_word_and_patch(text_queries):
    image, text = features()
    context = PositionContext(anchors=field_of(image, text), text_queries=text_queries)
    bias = alignment([0.5, -2.0]).bias(image, text, context)
    assert bias.shape == ((3, HEADS, 5, 7) if text_queries else (3, HEADS, 7, 5))
    expected = torch.zeros_like(bias if text_queries else bias.mT)
    for pair, word in WORDS.nonzero():
        for patch in range(6):
            halves = zip(text[pair, word].chunk(GROUPS), image[pair, patch].chunk(GROUPS))
            cosine = sum(cosine_similarity(a, b, dim=0) for a, b in halves) / GROUPS
            expected[pair, :, word, 1 + patch] = 10 * cosine * torch.tensor([0.5, -2.0]).double()
    torch.testing.assert_close(bias if text_queries else bias.mT, expected, rtol=0, atol=1e-12)


def test_alignment_starts_in_every_second_head_and_learns_from_zero(field):
    factors = create_position("alignment", heads=5, start=1.5).factors
    assert factors.tolist() == [1.5, 0, 1.5, 0, 1.5]
    position = create_position("alignment", heads=HEADS, start=0).double()
    layer = Attention(WIDTH, HEADS, output=False, positions=[position]).double()
    plain = Attention(WIDTH, HEADS, output=False).double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    inputs = *streams(), None, PositionContext(anchors=field)
    out = layer(*inputs)
    assert torch.equal(out, plain(*inputs))
    out.square().sum().backward()
    assert (position.factors.grad != 0).all()


def test_alignment_of_several_images():
    (image, text), (other, _) = features(), features()
    fields = [field_of(image, text), field_of(other, text)]
    position = alignment([1.0, 2.0])
    joined, *parts = (
        position.bias(text, image, PositionContext(anchors=field))
        for field in (join_paths(fields), *fields)
    )
    torch.testing.assert_close(joined, torch.cat(parts, dim=-1))
    with pytest.raises(ValueError, match="alignment needs similarities in its context"):
        position.bias(text, image, PositionContext())
