"""iRPE's fast path against Eqs 13-17 with the (T, T, head width) tensor built."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vlp.layers.attention import Attention
from vlp.positions import PositionContext, create_position
from vlp.positions.buckets import bucket_ids
from vlp.positions.irpe import RelativePosition

WIDTH, HEADS = 8, 2
METHODS = ("euclidean", "quantization", "cross", "product")
CASES = [((3, 4), 1), ((2, 5), 2), ((1, 6), 0)]


def filled(method, **options):
    position = create_position(f"irpe-{method}", width=WIDTH, heads=HEADS, **options).double()
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)
    return position


def transpositions(method, roles):
    """Values of `q_ids_transposed` that are taken."""
    return (False, True) if method in ("cross", "product") and "query" in roles else (False,)


def split(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def pair_vectors(position, role, method, grid, prefix, transposed=False):
    """r_ij as (heads, T, T, head width), or (heads, T, T) in bias mode, by a loop over pairs."""
    ids, _ = bucket_ids(method, *grid, prefix_tokens=prefix)
    table = position.tables[role]
    table = table.expand(HEADS, *table.shape[1:])
    tables = table.chunk(2, 1) if method == "cross" else (table,)
    ids = ids if method == "cross" else ids[None]
    tokens = prefix + grid[0] * grid[1]
    vectors = torch.zeros(HEADS, tokens, tokens, *table.shape[2:]).double()
    for one, pairs in zip(tables, ids, strict=True):
        for i in range(tokens):
            for j in range(tokens):
                vectors[:, i, j] += one[:, pairs[j, i] if transposed else pairs[i, j]]
    return vectors


def states(tokens, batch=2):
    return [torch.randn(batch, HEADS, tokens, WIDTH // HEADS).double() for _ in range(2)]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("roles", [("key",), ("query",), ("query", "key")])
@pytest.mark.parametrize("method", METHODS)
def test_contextual_bias_is_equations_15_and_16(method, roles, shared):
    for grid, prefix in CASES:
        for transposed in transpositions(method, roles):
            position = filled(
                method,
                grid=grid,
                roles=roles,
                shared_heads=shared,
                q_ids_transposed=transposed,
            )
            query, key = states(prefix + grid[0] * grid[1])
            expected = 0
            if "key" in roles:
                vectors = pair_vectors(position, "key", method, grid, prefix)
                expected = expected + torch.einsum("bhid,hijd->bhij", query, vectors)
            if "query" in roles:
                vectors = pair_vectors(position, "query", method, grid, prefix, transposed)
                expected = expected + torch.einsum("bhjd,hijd->bhij", key, vectors)
            bias = position("bias", query, key, PositionContext(grid, prefix))
            torch.testing.assert_close(bias, expected / (WIDTH // HEADS) ** 0.5, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_bias_mode_is_equation_14(method, inside, shared):
    for grid, prefix in CASES:
        for roles in (("key",), ("query", "key")):
            for transposed in transpositions(method, roles):
                position = filled(
                    method,
                    grid=grid,
                    mode="bias",
                    roles=roles,
                    shared_heads=shared,
                    q_ids_transposed=transposed,
                    bias_inside_scale=inside,
                )
                query, key = states(prefix + grid[0] * grid[1])
                expected = pair_vectors(position, "key", method, grid, prefix)
                if "query" in roles:
                    expected = expected + pair_vectors(
                        position, "query", method, grid, prefix, transposed
                    )
                bias = position("bias", query, key, PositionContext(grid, prefix))
                scale = (WIDTH // HEADS) ** 0.5 if inside else 1.0
                torch.testing.assert_close(
                    bias.expand(1, HEADS, -1, -1)[0], expected / scale, rtol=0, atol=1e-12
                )


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_values_are_equation_17(method, shared):
    for grid, prefix in CASES:
        position = filled(method, grid=grid, roles=("value",), shared_heads=shared)
        tokens = prefix + grid[0] * grid[1]
        attention = torch.randn(2, HEADS, tokens, tokens).double().softmax(-1)
        vectors = pair_vectors(position, "value", method, grid, prefix)
        torch.testing.assert_close(
            position("value", attention, PositionContext(grid, prefix)),
            torch.einsum("bhij,hijd->bhid", attention, vectors),
            rtol=0,
            atol=1e-12,
        )


@pytest.mark.parametrize("method", METHODS)
def test_inside_attention_on_queries_keys_and_values(method):
    grid, prefix = (3, 2), 1
    position = filled(method, grid=grid, roles=("query", "key", "value"))
    layer = Attention(WIDTH, HEADS, positions=[position]).double()
    x = torch.randn(2, 7, WIDTH).double()
    mask = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])
    query, key, value = split(layer.query(x)), split(layer.key(x)), split(layer.value(x))
    on_query, on_key, on_value = (
        pair_vectors(position, role, method, grid, prefix) for role in ("query", "key", "value")
    )
    # Eq. 16 with products written out, and Eq. 17
    logits = torch.einsum("bhid,bhjd->bhij", query, key)
    logits = logits + torch.einsum("bhid,hijd->bhij", query, on_key)
    logits = logits + torch.einsum("bhjd,hijd->bhij", key, on_query)
    logits = (logits / (WIDTH // HEADS) ** 0.5).masked_fill(~mask[:, None, None], -1e300)
    weights = logits.softmax(-1)
    out = weights @ value + torch.einsum("bhij,hijd->bhid", weights, on_value)
    expected = layer.output(out.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(layer(x, None, mask, PositionContext(grid, prefix)), expected)


@pytest.mark.parametrize("mode", ["contextual", "bias"])
def test_fused_and_explicit_attention_agree(mode):
    position = filled("product", mode=mode, roles=("query", "key"), shared_heads=False)
    layer = Attention(WIDTH, HEADS, positions=[position]).double()
    x, context = torch.randn(2, 7, WIDTH).double(), PositionContext((2, 3), 1)
    results = []
    for fused in (False, True):
        layer.fused = fused
        results.append(layer(x, None, torch.ones(2, 7, dtype=torch.bool), context))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("method", ["product", "cross"])
def test_gradients(method):
    grid, prefix = (2, 2), 1
    context = PositionContext(grid, prefix)
    position = filled(method, roles=("query", "key", "value"), shared_heads=False, ratio=0.6)
    query, key = (x.requires_grad_() for x in states(5, batch=1))
    attention = torch.randn(1, HEADS, 5, 5).double().softmax(-1).requires_grad_()

    def run(query, key, attention, *tables):
        named = dict(zip((f"tables.{role}" for role in position.roles), tables, strict=True))
        call = torch.func.functional_call
        bias = call(position, named, ("bias", query, key, context))
        return bias, call(position, named, ("value", attention, context))

    tables = [position.tables[role] for role in position.roles]
    assert torch.autograd.gradcheck(run, (query, key, attention, *tables))


def test_bias_mode_gradient_counts_the_pairs_of_a_bucket():
    position = filled("product", mode="bias", bias_inside_scale=False)
    query, key = states(7)
    position("bias", query, key, PositionContext((2, 3), 1)).sum().backward()
    ids, size = bucket_ids("product", 2, 3, prefix_tokens=1)
    counts = torch.bincount(ids.flatten(), minlength=size).double()
    assert torch.equal(position.tables["key"].grad[0], counts)


@pytest.mark.parametrize("mode", ["contextual", "bias"])
@pytest.mark.parametrize("method", METHODS)
def test_zero_tables_change_nothing(method, mode):
    roles = ("query", "key", "value") if mode == "contextual" else ("query", "key")
    position = create_position(
        f"irpe-{method}", width=WIDTH, heads=HEADS, grid=(2, 3), mode=mode, roles=roles
    )
    plain = Attention(WIDTH, HEADS)
    layer = Attention(WIDTH, HEADS, positions=[position])
    layer.load_state_dict(plain.state_dict() | position.state_dict(prefix="positions.0."))
    x = torch.randn(2, 7, WIDTH)
    assert torch.equal(layer(x, context=PositionContext((2, 3), 1)), plain(x))


def test_parameters_of_table_2():
    """DeiT-S: 22.05M, and per layer 50 rows of 64 shared, 6 x 50 x 64 else; bias mode 6 x 50."""

    def count(**options):
        position = create_position("irpe-product", width=384, heads=6, **options)
        return 12 * sum(parameter.numel() for parameter in position.parameters())

    assert count() == 38_400  # 22.05 -> 22.09M
    assert count(shared_heads=False) == 230_400  # 22.05 -> 22.28M
    assert count(mode="bias", shared_heads=False) == 3_600
    cross = create_position("irpe-cross", width=384, heads=6, ratio=20)
    assert cross.tables["key"].shape == (1, 2 * 82, 64)


def test_only_needed_hooks_are_named():
    def hooks(*roles, mode="contextual"):
        return RelativePosition("product", WIDTH, HEADS, roles=roles, mode=mode).hooks

    assert hooks("key") == hooks("query", "key", mode="bias") == {"bias"}
    assert hooks("value") == {"value"}
    assert hooks("query", "value") == {"bias", "value"}


@pytest.mark.parametrize("method", ["euclidean", "cross", "product"])
def test_one_table_serves_every_grid(method):
    """Patches inside a larger grid see the bias of the smaller one: it depends on offsets alone."""
    position = filled(method, roles=("key",))
    query, key = states(6 * 5)
    inside = (torch.arange(2)[:, None] * 5 + torch.arange(3)).flatten() + 6
    large = position("bias", query, key, PositionContext((6, 5)))
    small = position("bias", query[:, :, inside], key[:, :, inside], PositionContext((2, 3)))
    torch.testing.assert_close(large[:, :, inside][..., inside], small)


def test_the_grid_of_the_options_stands_in_for_a_missing_one():
    position = filled("product", grid=(2, 3))
    query, key = states(6)
    named = position("bias", query, key, PositionContext((2, 3)))
    assert torch.equal(position("bias", query, key, PositionContext()), named)
    other = position("bias", query, key, PositionContext((3, 2)))
    assert not torch.equal(other, named)


def test_tables_without_a_prefix_row():
    position = filled("cross", roles=("key",), prefix_bucket=False)
    wider = filled("cross", roles=("key",))
    with torch.no_grad():
        rows, columns = position.tables["key"].chunk(2, 1)
        blank = torch.full_like(rows[:, :1], 1e9)
        wider.tables["key"].copy_(torch.cat([rows, blank, columns, blank], 1))
    query, key = states(6)
    context = PositionContext((2, 3))
    assert torch.equal(position("bias", query, key, context), wider("bias", query, key, context))
    query, key = states(7)
    with pytest.raises(ValueError, match="1 prefix tokens, but prefix_bucket is False"):
        position("bias", query, key, PositionContext((2, 3), 1))


@pytest.mark.parametrize("mode", ["contextual", "bias"])
def test_bfloat16_autocast_stays_near_float64(mode):
    roles = ("query", "key", "value") if mode == "contextual" else ("query", "key")
    position = filled("product", mode=mode, roles=roles)
    layer = Attention(WIDTH, HEADS, positions=[position]).double()
    x, context = torch.randn(2, 13, WIDTH).double(), PositionContext((3, 4), 1)
    expected = layer(x, context=context)
    low = copy.deepcopy(layer).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        query, key = (split(part(x.float())) for part in (low.query, low.key))
        assert low.positions[0]("bias", query, key, context).dtype == torch.bfloat16
        for fused in (False, True):
            low.fused = fused
            out = low(x.float(), context=context)
            assert out.dtype == torch.bfloat16
            torch.testing.assert_close(out.double(), expected, rtol=0.05, atol=0.05)
    out.float().sum().backward()
    for parameter in low.positions.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()


class SumsOfBuckets(TorchDispatchMode):
    """Number types in which buckets are summed, forward and backward."""

    def __init__(self):
        super().__init__()
        self.kinds = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if "scatter_add" in str(function):
            self.kinds.append(arguments[0].dtype)
        return function(*arguments, **(named or {}))


def test_buckets_are_summed_in_float32_where_states_are_bfloat16():
    """On GPUs a sum of many small bfloat16 numbers stops growing; on CPU it would not show."""
    position = filled("product", roles=("query", "key", "value")).to(torch.bfloat16)
    query, key = (x.to(torch.bfloat16) for x in states(6))
    attention = torch.full((2, HEADS, 6, 6), 1 / 6, dtype=torch.bfloat16)
    with SumsOfBuckets() as sums:
        bias = position("bias", query, key, PositionContext((2, 3)))
        value = position("value", attention, PositionContext((2, 3)))
        assert bias.dtype == value.dtype == torch.bfloat16
        (bias.sum() + value.sum()).backward()
    # the value's forward pass and the gradients of both gathers
    assert sums.kinds == [torch.float32] * 3


def test_training_works_after_inference_mode_saw_the_same_grid():
    position = filled("product", roles=("key", "value"))
    query, key = states(77)
    attention = torch.full((2, HEADS, 77, 77), 1 / 77).double()
    context = PositionContext((7, 11))
    with torch.inference_mode():
        position("bias", query, key, context)
        position("value", attention, context)
    loss = position("bias", query, key, context).sum()
    (loss + position("value", attention, context).sum()).backward()
    assert position.tables["key"].grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("queries", "keys"),
    [(6, 6), (8, 8), (7, 5), (5, 7)],
)
def test_tokens_that_are_not_the_grid_are_an_error(queries, keys):
    position = filled("product", roles=("key", "value"))
    context = PositionContext((2, 3), 1)
    query, key = states(queries)[0], states(keys)[0]
    with pytest.raises(
        ValueError, match=f"2 x 3 grid are 7 tokens .* {queries} queries and {keys}"
    ):
        position("bias", query, key, context)
    with pytest.raises(ValueError, match=f"7 tokens .* {queries} queries and {keys} keys"):
        position("value", torch.zeros(1, HEADS, queries, keys).double(), context)


def test_a_missing_grid_is_an_error():
    with pytest.raises(ValueError, match="irpe-product needs a grid"):
        filled("product")("bias", *states(6), PositionContext())


def test_quantization_is_bound_to_its_grid():
    position = filled("quantization", grid=(2, 3))
    with pytest.raises(ValueError, match=r"irpe-quantization .* 2 x 3 grid .* over to 3 x 2"):
        position("bias", *states(6), PositionContext((3, 2)))
    with pytest.raises(ValueError, match="needs that grid"):
        filled("quantization")
    for option in ({"variant": "squared"}, {"universe": "global"}):
        position = filled("quantization", **option)
        assert position("bias", *states(6), PositionContext((3, 2))).shape == (2, HEADS, 6, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "relative"}, "mode 'relative'; one of contextual, bias"),
        ({"roles": ("key", "output")}, "roles .*'output'"),
        ({"roles": ()}, r"roles \(\)"),
        ({"mode": "bias", "roles": ("key", "value")}, "bias mode has no encoding on values"),
        ({"bias_inside_scale": False}, "bias_inside_scale is a choice of bias mode"),
        ({"heads": 3}, "3 heads do not divide width 8"),
        ({"function": "linear"}, "takes 'piecewise' | 'clip', not 'linear'"),
        ({"ratio": -1.0}, "ratio must be positive, not -1.0"),
    ],
)
def test_impossible_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        create_position("irpe-product", **{"width": WIDTH, "heads": HEADS} | options)


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        ("product", {"pre_round": True}, "outside of irpe-euclidean"),
        ("cross", {"variant": "squared"}, "outside of irpe-quantization"),
        ("euclidean", {"universe": "global"}, "where distances are not ranked"),
        ("quantization", {"universe": "global", "variant": "squared"}, "are not ranked"),
        ("euclidean", {"q_ids_transposed": True, "roles": ("query",)}, "have no direction"),
        ("product", {"q_ids_transposed": True, "roles": ("key", "value")}, "without the role que"),
    ],
)
def test_options_without_effect_are_refused(method, options, reason):
    first = next(iter(options))
    message = f"irpe-{method}: {first}={options[first]!r} has no effect .*{reason}"
    with pytest.raises(ValueError, match=message):
        filled(method, **options)


def test_options_of_another_encoding_are_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'irpe-product': .*'groups'; options: width, .*roles"):
        create_position("irpe-product", width=WIDTH, heads=HEADS, groups=8)
    with pytest.raises(ValueError, match=r"'irpe-product': .*'method'"):
        create_position("irpe-product", width=WIDTH, heads=HEADS, method="cross")
    with pytest.raises(ValueError, match=r"'irpe-product': .*'heads'"):
        create_position("irpe-product", width=WIDTH)
