import functools
import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vlp.positions.base import PositionContext
from vlp.positions.cope import ContextualPosition
from vlp.positions.semantic import (
    SemanticPosition,
    _distance_by_entry,
    cope_bias,
    pair_distance,
    sape_bias,
)

WIDTH, HEADS, DIM = 8, 2, 4
GRIDS = [(3, 4), (4, 2), (1, 5), (5, 1), (1, 1)]


def states(tokens, batch=2):
    return [torch.randn(batch, HEADS, tokens, DIM).double() for _ in range(2)]


def filled(position):
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)
    return position.double()


def vector_at(table, place):
    """e(p), between the two rows of the table next to p; the last row beyond the table."""
    place = place.clamp(max=len(table) - 1)
    low, high = math.floor(place.item()), math.ceil(place.item())
    share = place - low
    return (1 - share) * table[low] + share * table[high]


def gated_sum(query, keys, scale):
    return sum((torch.sigmoid(scale * (query @ key)) for key in keys), torch.zeros(()).double())


def cope_by_loop(query, key, table, causal, gate_scale=1.0, bias_scale=1.0):
    tokens = len(query)
    rows = []
    for i in range(tokens):
        for j in range(tokens):
            if causal and j > i:
                rows.append(torch.zeros(()).double())
                continue
            counted = key[j : i + 1] if causal else key[j:]
            place = gated_sum(query[i], counted, gate_scale)
            rows.append(bias_scale * query[i] @ vector_at(table, place))
    return torch.stack(rows).unflatten(0, (tokens, tokens))


def sape_by_loop(
    grid, mode, query, key, table_x, table_y, summation, gate_scale=1.0, bias_scale=1.0
):
    height, width = grid
    source = {"key": key, "query": query}[mode]

    def vector(i, members, own, table):
        """The entries of z_i along one line: `members` are its patches, i is number `own`."""
        entries = []
        for t in range(len(members)):
            if summation == "between":
                counted = members[min(own, t) : max(own, t) + 1]
            else:
                counted = members[t:]
            place = gated_sum(query[i], [key[s] for s in counted], gate_scale)
            entries.append(source[i] @ vector_at(table, place))
        return torch.stack(entries)

    along, upright = [], []
    for i in range(height * width):
        row, column = divmod(i, width)
        along.append(vector(i, [row * width + t for t in range(width)], column, table_x))
        upright.append(vector(i, [t * width + column for t in range(height)], row, table_y))
    out = torch.zeros(height * width, height * width).double()
    for i, j in itertools.permutations(range(height * width), 2):
        for vectors in (along, upright):
            squares = (vectors[i] - vectors[j]).square().sum()
            if squares > 0:
                out[i, j] = out[i, j] - bias_scale * squares.sqrt()
    return out


def by_head(function, query, key, *tables):
    """Apply to every sample and head; tables (heads or 1, P, d)."""
    tables = [table.expand(HEADS, -1, -1) for table in tables]
    rows = [
        function(query[sample, head], key[sample, head], *(table[head] for table in tables))
        for sample, head in itertools.product(range(len(query)), range(HEADS))
    ]
    return torch.stack(rows).unflatten(0, (-1, HEADS))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 2, 4, 9])
@pytest.mark.parametrize("causal", [True, False])
def test_cope_is_the_loop(causal, rows):
    query, key = states(6)
    for table in (torch.randn(1, rows, DIM).double(), torch.randn(HEADS, rows, DIM).double()):
        for scales in ({}, {"gate_scale": 0.3, "bias_scale": -2.5}):
            by_loop = functools.partial(cope_by_loop, causal=causal, **scales)
            expected = by_head(by_loop, query, key, table)
            options = scales if causal else {"causal": False, **scales}
            close(cope_bias(query, key, table, **options), expected)
    close(cope_bias(query[0, 1], key[0, 1], table[1], **options), expected[0, 1])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("prefix", [0, 2])
def test_the_encoding_counts_tokens_after_the_prefix(prefix, causal, shared):
    options = {"gate_scale": 0.5, "bias_scale": 2.0}
    position = filled(
        ContextualPosition(WIDTH, HEADS, 4, causal=causal, shared_heads=shared, **options)
    )
    assert position.hooks == {"bias"}
    assert position.table.shape == (1 if shared else HEADS, 5, DIM)
    query, key = states(prefix + 6)
    found = position("bias", query, key, PositionContext((2, 3), prefix))
    by_loop = functools.partial(cope_by_loop, causal=causal, **options)
    expected = by_head(by_loop, query[:, :, prefix:], key[:, :, prefix:], position.table)
    close(found, torch.nn.functional.pad(expected, (prefix, 0, prefix, 0)))


def test_cope_takes_any_length_and_shares_the_last_row_beyond_its_table():
    position = filled(ContextualPosition(WIDTH, HEADS, grid=(1, 2)))
    open_keys = torch.full((1, HEADS, 9, DIM), 100.0).double()
    query = open_keys / 100
    found = position("bias", query, open_keys, PositionContext())
    last = query[0, 0, 0] @ position.table[0, -1]
    torch.testing.assert_close(found[..., :8], last.expand(1, HEADS, 9, 8))
    assert not torch.allclose(found[..., 8], last)
    assert position("bias", query[:, :, :0], open_keys[:, :, :0], PositionContext()).numel() == 0


@pytest.mark.parametrize("summation", ["between", "suffix"])
@pytest.mark.parametrize("mode", ["key", "query"])
@pytest.mark.parametrize("grid", GRIDS)
def test_sape_is_the_loop(grid, mode, summation):
    query, key = states(grid[0] * grid[1])
    for heads, places_x, places_y in ((1, 2, 3), (HEADS, 6, 6), (HEADS, 1, 3)):
        table_x = torch.randn(heads, places_x, DIM).double()
        table_y = torch.randn(heads, places_y, DIM).double()
        for scales in ({}, {"gate_scale": 0.4, "bias_scale": 3.0}):
            by_loop = functools.partial(sape_by_loop, grid, mode, summation=summation, **scales)
            expected = by_head(by_loop, query, key, table_x, table_y)
            options = {"mode": mode, "summation": summation, **scales}
            if (mode, summation) == ("key", "between"):
                options = scales
            close(sape_bias(query, key, grid, table_x, table_y, **options), expected)
    single = sape_bias(query[0, 1], key[0, 1], grid, table_x[1], table_y[1], **options)
    close(single, expected[0, 1])


def sape_inputs(grid, rows=None):
    tables = [torch.randn(rows or size + 1, DIM).double() for size in (grid[1], grid[0])]
    return *states(grid[0] * grid[1]), grid, *tables


@pytest.mark.parametrize("mode", ["key", "query"])
def test_gradients_of_sape_are_those_of_the_loop(mode):
    grid = (2, 3)
    query, key = (x[0, 0].requires_grad_() for x in states(6))
    tables = [torch.randn(3, DIM).double().requires_grad_() for _ in range(2)]
    weights = torch.randn(6, 6).double()
    inputs = (query, key, *tables)
    for summation in ("between", "suffix"):
        fast = sape_bias(query, key, grid, *tables, mode, summation=summation)
        slow = sape_by_loop(grid, mode, query, key, *tables, summation)
        found, expected = (torch.autograd.grad((x * weights).sum(), inputs) for x in (fast, slow))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


def test_distances_near_zero_are_exact():
    for spread in (1.0, 1e-3, 1e-6, 1e-9):
        vectors = torch.randn(1, 5).double() + spread * torch.randn(30, 5).double()
        expected = torch.zeros(30, 30).double()
        for i, j in itertools.product(range(30), repeat=2):
            expected[i, j] = math.dist(vectors[i].tolist(), vectors[j].tolist())
        for distance in (pair_distance, _distance_by_entry):
            torch.testing.assert_close(distance(vectors), expected, rtol=1e-12, atol=0)
            low = distance(vectors.float())
            exact = pair_distance(vectors.float().double())  # of the numbers that float32 has
            torch.testing.assert_close(low.double(), exact, rtol=1e-6, atol=0)


def test_gradients_of_the_distance():
    vectors = torch.randn(2, 5, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(pair_distance, (vectors,))
    assert torch.autograd.gradgradcheck(lambda x: pair_distance(x).square().sum(), (vectors,))

    def total(x):
        return (pair_distance(x) * weights).sum()

    weights = torch.randn(5, 5).double()
    expected = torch.autograd.grad(total(vectors), vectors)[0]
    assert torch.equal(torch.func.vmap(torch.func.grad(total))(vectors.detach()), expected)


@pytest.mark.parametrize("spread", [1.0, 1e-2, 1e-4])
def test_gradients_of_near_vectors_keep_the_digits_of_float32(spread):
    vectors = (torch.randn(1, 5) + spread * torch.randn(30, 5)).requires_grad_()
    weights = torch.randn(30, 30)
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found = torch.autograd.grad((pair_distance(vectors) * weights).sum(), vectors)[0]
        wide = vectors.detach().double().requires_grad_()
        differences = wide[:, None] - wide
        apart = ~torch.eye(30).bool()
        total = (differences[apart].norm(dim=-1) * weights[apart].double()).sum()
        expected = torch.autograd.grad(total, wide)[0]
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


def test_equal_vectors_have_distance_and_gradient_zero():
    vectors = torch.randn(4, 3).double()
    vectors[2] = vectors[0]
    vectors.requires_grad_()
    distance = pair_distance(vectors)
    assert distance[0, 2] == distance[2, 0] == 0
    distance[0, 2].backward()
    assert (vectors.grad == 0).all()
    vectors.grad = None
    pair_distance(torch.zeros_like(vectors) * vectors).sum().backward()
    assert (vectors.grad == 0).all()


class Largest(TorchDispatchMode):
    entries = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        out = function(*arguments, **(named or {}))
        if isinstance(out, torch.Tensor):
            self.entries = max(self.entries, out.numel())
        return out


def test_nothing_larger_than_the_bias_is_made():
    query, key, grid, table_x, table_y = sape_inputs((6, 6))
    query.requires_grad_()
    for distance in (None, _distance_by_entry):
        with Largest() as largest:
            if distance is None:
                sape_bias(query, key, grid, table_x, table_y).sum().backward()
            else:
                distance(torch.randn(2, HEADS, 36, 6).double())
        assert largest.entries == 2 * HEADS * 36 * 36
    with Largest() as largest:
        cope_bias(query, key, table_x).sum().backward()
    assert largest.entries == 2 * HEADS * 36 * 36


@pytest.mark.parametrize("mode", ["key", "query", "both"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("prefix", [0, 2])
def test_the_encoding_leaves_the_prefix_out_of_its_lines(prefix, shared, mode):
    options = {"gate_scale": 0.5, "bias_scale": 2.0, "summation": "suffix"}
    position = SemanticPosition(WIDTH, HEADS, (2, 3), mode, shared, **options)
    filled(position)
    assert position.hooks == {"bias"}
    modes = ("key", "query") if mode == "both" else (mode,)
    assert set(position.tables_x) == set(position.tables_y) == set(modes)
    query, key = states(prefix + 6)
    found = position("bias", query, key, PositionContext((2, 3), prefix))
    expected = 0
    for side in modes:
        tables = position.tables_x[side], position.tables_y[side]
        heads = 1 if shared else HEADS
        assert [tuple(table.shape) for table in tables] == [(heads, n, DIM) for n in (4, 3)]
        by_loop = functools.partial(sape_by_loop, (2, 3), side, **options)
        inputs = query[:, :, prefix:], key[:, :, prefix:], *tables
        expected = expected + by_head(by_loop, *inputs)
    close(found, torch.nn.functional.pad(expected, (prefix, 0, prefix, 0)))


def test_the_start_has_its_deviation_and_no_decay():
    for options in ({}, {"deviation": 0.3}):
        position = SemanticPosition(384, 6, (14, 14), "both", **options)
        for name, table in position.named_parameters():
            expected = options.get("deviation", 0.02)
            assert table.std().item() == pytest.approx(expected, rel=0.1)
            assert name in position.no_weight_decay()


POSITIONS = [
    lambda: filled(ContextualPosition(WIDTH, HEADS, grid=(3, 4))),
    lambda: filled(SemanticPosition(WIDTH, HEADS, (3, 4), "both")),
]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("make", POSITIONS, ids=["cope", "sape"])
def test_gradients_are_finite_for_equal_zero_and_single_patches(make, kind):
    position = make().to(kind)
    for query in (
        torch.zeros(1, HEADS, 12, DIM),
        torch.ones(1, HEADS, 12, DIM),
        torch.full((1, HEADS, 12, DIM), 100.0),
        torch.randn(1, HEADS, 1, DIM),
    ):
        query = query.to(kind).requires_grad_()
        context = PositionContext((3, 4) if query.shape[2] == 12 else (1, 1))
        bias = position("bias", query, query, context)
        assert bias.dtype == kind
        assert bias.isfinite().all()
        bias.float().sum().backward()
        for tensor in (query, *position.parameters()):
            assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("make", POSITIONS, ids=["cope", "sape"])
def test_states_that_are_no_numbers_give_no_numbers(make):
    """A diverged run must fail as a loss that is NaN, not as an index outside the table."""
    query, key = states(12)
    query[0, 0, 0, 0] = math.nan
    bias = make()("bias", query, key, PositionContext((3, 4)))
    assert bias[0, 0].isnan().any()
    assert bias[1].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "value"}, "SaPE mode 'value'; one of key, query"),
        ({"summation": "prefix"}, "SaPE summation 'prefix'; one of between, suffix"),
        ({"grid": (3, 3)}, "a grid of 3 x 3 patches does not fit 12 tokens"),
        ({"grid": (-3, -4)}, "a grid of -3 x -4 patches"),
        ({"key": torch.zeros(2, HEADS, 11, DIM)}, r"\(2, 2, 12, 4\), \(2, 2, 11, 4\) and \(5, 4\)"),
        ({"table_y": torch.zeros(5, 3)}, r"SaPE takes .* and \(5, 4\), \(5, 3\)"),
        ({"table_x": torch.zeros(0, 4)}, r"tables \(rows, d\), not .* and \(0, 4\)"),
    ],
)
def test_impossible_inputs_of_sape_are_named(change, message):
    query, key, grid, table_x, table_y = sape_inputs((3, 4), rows=5)
    inputs = {"query": query, "key": key, "grid": grid, "table_x": table_x, "table_y": table_y}
    with pytest.raises(ValueError, match=message):
        sape_bias(**inputs | change)


def test_impossible_inputs_of_cope_are_named():
    query, key = states(5)
    with pytest.raises(ValueError, match=r"CoPE takes .* \(2, 2, 5, 4\) and \(3, 5\)"):
        cope_bias(query, key, torch.zeros(3, 5).double())
    position = ContextualPosition(WIDTH, HEADS, 6)
    with pytest.raises(ValueError, match="not 5 queries and 4 keys with 1 prefix"):
        position("bias", query, key[:, :, 1:], PositionContext(None, 1))
    with pytest.raises(ValueError, match="not 5 queries and 5 keys with 6 prefix"):
        position("bias", query, key, PositionContext(None, 6))
