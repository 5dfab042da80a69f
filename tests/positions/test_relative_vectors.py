import math
from itertools import product

import pytest
import torch

from vlp.positions import PositionContext, create_position

WIDTH, HEADS, DEPTH = 8, 2, 4
GRIDS = [((3, 4), 1), ((2, 6), 2), ((1, 5), 0), ((1, 1), 1)]


def made(name, **options):
    position = create_position(name, width=WIDTH, heads=HEADS, **options).double()
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)
    return position


def states(tokens):
    return torch.randn(2, 2, HEADS, tokens, DEPTH).double()


def wave(number, width, theta=10_000.0):
    angles = [number * theta ** (-2 * k / width) for k in range(width // 2)]
    return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)


def pair_vectors(grid, prefix, reach, vector, apart):
    """(heads, T, T, head width): `vector(down, right, raster)` of clipped offsets i - j.

    Pairs with a prefix token have `apart`.
    """
    tokens = prefix + grid[0] * grid[1]
    out = torch.zeros(HEADS, tokens, tokens, DEPTH).double()

    def clip(offset):
        return max(-reach, min(reach, offset))

    for i, j in product(range(tokens), repeat=2):
        a, b = i - prefix, j - prefix
        if min(a, b) < 0:
            out[:, i, j] = apart
        else:
            down, right = a // grid[1] - b // grid[1], a % grid[1] - b % grid[1]
            out[:, i, j] = vector(clip(down), clip(right), clip(a - b))
    return out


def table_vectors(table, grid, prefix, reach, offsets):
    """Rows of one table for both offsets, or for the raster's; the last row is the prefix's."""
    table = table.expand(HEADS, -1, -1)

    def vector(down, right, raster):
        if offsets == "raster":
            return table[:, raster + reach]
        return table[:, (down + reach) * (2 * reach + 1) + right + reach]

    return pair_vectors(grid, prefix, reach, vector, table[:, -1])


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


readings = pytest.mark.parametrize(
    ("reach", "offsets", "shared"), [*product((1, 3), ("product", "raster"), (True, False))]
)


@readings
def test_shaw_is_equations_7_and_8(reach, offsets, shared):
    position = made("shaw", reach=reach, offsets=offsets, shared_heads=shared)
    for grid, prefix in GRIDS:
        on_key, on_value = (
            table_vectors(position.tables[role], grid, prefix, reach, offsets)
            for role in ("key", "value")
        )
        query, key = states(prefix + grid[0] * grid[1])
        attention, context = (query @ key.mT).softmax(-1), PositionContext(grid, prefix)
        expected = torch.einsum("bhid,hijd->bhij", query, on_key) / DEPTH**0.5
        close(position("bias", query, key, context), expected)
        expected = torch.einsum("bhij,hijd->bhid", attention, on_value)
        close(position("value", attention, context), expected)


@readings
def test_huang_is_equation_11(reach, offsets, shared):
    position = made("huang", reach=reach, offsets=offsets, shared_heads=shared)
    for grid, prefix in GRIDS:
        p = table_vectors(position.table, grid, prefix, reach, offsets)
        query, key = states(prefix + grid[0] * grid[1])
        logits = ((query[:, :, :, None] + p) * (key[:, :, None] + p)).sum(-1) - p.square().sum(-1)
        bias = position("bias", query, key, PositionContext(grid, prefix))
        close((query @ key.mT) / DEPTH**0.5 + bias, logits / DEPTH**0.5)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("reach", [None, 1])
def test_sasa_is_equation_12(reach, shared):
    position = made("sasa", grid=(3, 4), reach=reach, shared_heads=shared)
    reach = position.reach
    x, y = (table.expand(HEADS, -1, -1) for table in (position.table_x, position.table_y))
    for grid, prefix in [*GRIDS, ((4, 3), 0), ((2, 7), 2)]:
        vectors = pair_vectors(
            *(grid, prefix, reach),
            lambda down, right, _: torch.cat([x[:, right + reach], y[:, down + reach]], -1),
            torch.cat([x[:, -1], y[:, -1]], -1),
        )
        query, key = states(prefix + grid[0] * grid[1])
        bias = position("bias", query, key, PositionContext(grid, prefix))
        close(bias, torch.einsum("bhid,hijd->bhij", query, vectors) / DEPTH**0.5)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("offsets", ["product", "axes", "raster"])
@pytest.mark.parametrize("reach", [1, 3])
def test_transformer_xl_is_equation_10(reach, offsets, shared):
    position = made("transformer-xl", reach=reach, offsets=offsets, shared_heads=shared)
    projection, u, v = (
        x.expand(HEADS, *x.shape[1:]) for x in (position.projection, position.u, position.v)
    )

    def vector(down, right, raster):
        if offsets == "axes":
            waves = torch.cat([wave(right, WIDTH // 2), wave(down, WIDTH // 2)])
        elif offsets == "product":
            waves = wave(down * (2 * reach + 1) + right, WIDTH)
        else:
            waves = wave(raster, WIDTH)
        return waves @ projection

    for grid, prefix in GRIDS:
        relative = pair_vectors(grid, prefix, reach, vector, position.prefix[:, 0])
        query, key = states(prefix + grid[0] * grid[1])
        logits = (query + u) @ key.mT + torch.einsum("bhid,hijd->bhij", query + v, relative)
        bias = position("bias", query, key, PositionContext(grid, prefix))
        close(query @ key.mT / DEPTH**0.5 + bias, logits / DEPTH**0.5)


def test_options_of_transformer_xls_sinusoid_reach_the_bias():
    """The layout is a permutation of W^R's rows; temperature and width are others' sinusoids."""
    halves, context = made("transformer-xl", sinusoid_width=6), PositionContext((2, 3), 1)
    query, key = states(7)
    bias = halves("bias", query, key, context)

    def other(order, **options):
        position = made("transformer-xl", sinusoid_width=6, **options)
        position.load_state_dict(halves.state_dict())
        with torch.no_grad():
            position.projection.copy_(halves.projection[:, order])
        return position("bias", query, key, context)

    close(other([0, 3, 1, 4, 2, 5], layout="interleaved"), bias)
    assert not torch.allclose(other(list(range(6)), temperature=100.0), bias)


@pytest.mark.parametrize("offsets", ["product", "axes", "raster"])
def test_a_long_reach_of_transformer_xl_costs_nothing(offsets):
    query, key = states(9)
    key = key[:, :, :1].expand(-1, -1, 9, -1)
    long = made("transformer-xl", offsets=offsets, reach=10**6)
    row = long("bias", query, key, PositionContext((1, 9)))[:, :, 0]
    assert (row.diff().abs() > 1e-9).all()


@pytest.mark.parametrize(
    ("name", "options", "shapes"),
    [
        ("shaw", {}, {"tables.key": (1, 50, 64), "tables.value": (1, 50, 64)}),
        ("shaw", {"offsets": "raster", "roles": ("key",)}, {"tables.key": (1, 8, 64)}),
        ("shaw", {"roles": ("value",)}, {"tables.value": (1, 50, 64)}),
        ("huang", {"shared_heads": False, "reach": 5}, {"table": (6, 122, 64)}),
        ("sasa", {"grid": (14, 14)}, {"table_x": (1, 28, 32), "table_y": (1, 28, 32)}),
        (
            "transformer-xl",
            {},
            {"projection": (1, 384, 64), "u": (1, 1, 64), "v": (1, 1, 64), "prefix": (1, 1, 64)},
        ),
        (
            "transformer-xl",
            {"shared_heads": False, "prefix_bucket": False, "sinusoid_width": 64},
            {"projection": (6, 64, 64), "u": (6, 1, 64), "v": (6, 1, 64)},
        ),
    ],
)
def test_tables_of_the_papers_sizes(name, options, shapes):
    """DeiT-S: 50 rows of 64 channels; SASA's 27 offsets and a prefix (iRPE's Table 5)."""
    position = create_position(name, width=384, heads=6, **options)
    if name == "shaw":
        roles = {"tables.key": "bias", "tables.value": "value"}
        assert position.hooks == {roles[key] for key in shapes}
    assert {key: tuple(table.shape) for key, table in position.named_parameters()} == shapes
