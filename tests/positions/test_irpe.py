import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vlp.positions import PositionContext, create_position
from vlp.positions.buckets import bucket_ids
from vlp.positions.irpe import RelativePosition
from vlp.positions.lookup import attended_rows, products

WIDTH, HEADS = 8, 2
METHODS = ("euclidean", "quantization", "cross", "product")
CASES = [((3, 4), 1), ((2, 5), 2), ((1, 6), 0)]


def filled(method, **options):
    position = create_position(f"irpe-{method}", width=WIDTH, heads=HEADS, **options).double()
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)
    return position


def transpositions(method, roles):
    return (False, True) if method in ("cross", "product") and "query" in roles else (False,)


def pair_vectors(position, role, method, grid, prefix, transposed=False):
    """r_ij as (heads, T, T, head width), or (heads, T, T) in bias mode, by a loop over pairs."""
    ids, _ = bucket_ids(method, *grid, prefix_tokens=prefix)
    table = position.tables[role]
    table = table.expand(HEADS, *table.shape[1:])
    tables = table.chunk(2, 1) if method == "cross" else (table,)
    ids = ids if method == "cross" else ids[None]
    tokens = prefix + grid[0] * grid[1]
    vectors = torch.zeros(HEADS, tokens, tokens, *table.shape[2:]).double()
    for rows, pairs in zip(tables, ids.mT if transposed else ids, strict=True):
        for i in range(tokens):
            for j in range(tokens):
                vectors[:, i, j] += rows[:, pairs[i, j]]
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
                method, grid=grid, roles=roles, shared_heads=shared, q_ids_transposed=transposed
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
                options = {"roles": roles, "shared_heads": shared, "bias_inside_scale": inside}
                options |= {"grid": grid, "mode": "bias", "q_ids_transposed": transposed}
                position = filled(method, **options)
                query, key = states(prefix + grid[0] * grid[1])
                expected = pair_vectors(position, "key", method, grid, prefix)
                if "query" in roles:
                    other = pair_vectors(position, "query", method, grid, prefix, transposed)
                    expected = expected + other
                bias = position("bias", query, key, PositionContext(grid, prefix))
                scale = (WIDTH // HEADS) ** 0.5 if inside else 1.0
                bias = bias.expand(1, HEADS, -1, -1)[0]
                torch.testing.assert_close(bias, expected / scale, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_values_are_equation_17(method, shared):
    for grid, prefix in CASES:
        position = filled(method, grid=grid, roles=("value",), shared_heads=shared)
        tokens = prefix + grid[0] * grid[1]
        attention = torch.randn(2, HEADS, tokens, tokens).double().softmax(-1)
        vectors = pair_vectors(position, "value", method, grid, prefix)
        out = position("value", attention, PositionContext(grid, prefix))
        expected = torch.einsum("bhij,hijd->bhid", attention, vectors)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


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


def test_a_table_of_ranks_is_loaded_on_its_own_grid_alone():
    small, large = (filled("quantization", grid=grid) for grid in ((4, 4), (6, 6)))
    with pytest.raises(RuntimeError, match="ranks the distances of a 4 x 4 grid there and of 6 x"):
        large.load_state_dict(small.state_dict())
    filled("quantization", grid=(4, 4)).load_state_dict(small.state_dict())
    for options in ({"universe": "global"}, {"variant": "squared"}):
        trained, other = (filled("quantization", grid=grid, **options) for grid in ((4, 4), (6, 6)))
        other.load_state_dict(trained.state_dict())


def test_only_needed_hooks_are_named():
    def hooks(*roles, mode="contextual"):
        return RelativePosition("product", WIDTH, HEADS, roles=roles, mode=mode).hooks

    assert hooks("key") == hooks("query", "key", mode="bias") == {"bias"}
    assert hooks("value") == {"value"}
    assert hooks("query", "value") == {"bias", "value"}


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


def test_quantization_is_bound_to_its_grid():
    position = filled("quantization", grid=(2, 3))
    with pytest.raises(ValueError, match=r"irpe-quantization .* 2 x 3 grid .* over to 3 x 2"):
        position("bias", *states(6), PositionContext((3, 2)))
    with pytest.raises(ValueError, match="set the option grid"):
        filled("quantization")
    for option in ({"variant": "squared"}, {"universe": "global"}):
        position = filled("quantization", **option)
        assert position("bias", *states(6), PositionContext((3, 2))).shape == (2, HEADS, 6, 6)


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        ("product", {"pre_round": True}, "outside of irpe-euclidean"),
        ("cross", {"variant": "squared"}, "outside of irpe-quantization"),
        ("euclidean", {"universe": "global"}, "if distances are not ranked"),
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


class Largest(TorchDispatchMode):
    """Entries of the largest tensor made, and number types in which rows are summed."""

    def __init__(self):
        super().__init__()
        self.entries, self.kinds = 0, []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        out = function(*arguments, **(named or {}))
        if isinstance(out, torch.Tensor):
            self.entries = max(self.entries, out.untyped_storage().nbytes() // out.element_size())
        if "scatter_add" in str(function):
            self.kinds.append(arguments[0].dtype)
        return out


def test_no_vector_per_pair_is_built_and_rows_are_summed_in_float32():
    tokens, channels = 24, 16
    pairs = torch.randint(0, 6, (1, tokens, tokens))
    states = torch.randn(1, 1, tokens, channels, dtype=torch.bfloat16, requires_grad=True)
    table = torch.randn(1, 6, channels, dtype=torch.bfloat16, requires_grad=True)
    attention = torch.full((1, 1, tokens, tokens), 1 / tokens, dtype=torch.bfloat16)
    attention.requires_grad_()
    with Largest() as seen:
        logits = products(states, table, pairs, 1.0).dense()
        values = attended_rows(attention, table, pairs)
        (logits.sum() + values.sum()).backward()
    assert logits.dtype == torch.float32
    assert values.dtype == torch.bfloat16
    assert seen.entries == tokens * tokens
    assert seen.kinds == [torch.float32] * 2  # the values, and the gradient of the products
