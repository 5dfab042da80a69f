"""Shaw's vectors on keys and values against Eqs 7-9, pair by pair."""

from __future__ import annotations

import pytest
import torch

from vlp.positions import PositionContext
from vlp.positions.irpe import RelativePosition
from vlp.positions.shaw import ShawPosition

WIDTH, HEADS, DEPTH = 8, 2, 4
CASES = [((3, 4), 1), ((2, 6), 2), ((1, 5), 0), ((1, 1), 1)]


def filled(**options):
    position = ShawPosition(WIDTH, HEADS, **options).double()
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)
    return position


def pair_vectors(table, grid, prefix, reach, raster=False):
    """p_clip(i - j) as (heads, T, T, head width), by a loop over pairs."""
    table = table.expand(HEADS, -1, -1)
    tokens, columns, side = prefix + grid[0] * grid[1], grid[1], 2 * reach + 1
    vectors = torch.zeros(HEADS, tokens, tokens, DEPTH).double()
    for i in range(tokens):
        for j in range(tokens):
            a, b = i - prefix, j - prefix

            def clip(x):
                return max(-reach, min(reach, x)) + reach

            if min(a, b) < 0:
                row = -1
            elif raster:
                row = clip(a - b)
            else:
                row = clip(a // columns - b // columns) * side + clip(a % columns - b % columns)
            vectors[:, i, j] = table[:, row]
    return vectors


def states(tokens):
    return torch.randn(2, 2, HEADS, tokens, DEPTH).double()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("offsets", ["product", "raster"])
@pytest.mark.parametrize("reach", [1, 3])
def test_keys_and_values_are_equations_7_and_8(reach, offsets, shared):
    position = filled(reach=reach, offsets=offsets, shared_heads=shared)
    for grid, prefix in CASES:
        context, raster = PositionContext(grid, prefix), offsets == "raster"
        on_key, on_value = (
            pair_vectors(position.tables[role], grid, prefix, reach, raster)
            for role in ("key", "value")
        )
        query, key = states(prefix + grid[0] * grid[1])
        attention = (query @ key.mT).softmax(-1)
        torch.testing.assert_close(
            position("bias", query, key, context),
            torch.einsum("bhid,hijd->bhij", query, on_key) / DEPTH**0.5,
            rtol=0,
            atol=1e-12,
        )
        torch.testing.assert_close(
            position("value", attention, context),
            torch.einsum("bhij,hijd->bhid", attention, on_value),
            rtol=0,
            atol=1e-12,
        )


@pytest.mark.parametrize("shared", [True, False])
def test_on_images_it_is_the_product_method_with_the_clip_function(shared):
    position = filled(shared_heads=shared)
    product = RelativePosition(
        "product",
        WIDTH,
        HEADS,
        roles=("key", "value"),
        function="clip",
        shared_heads=shared,
    ).double()
    product.load_state_dict(position.state_dict())
    context = PositionContext((5, 9), 1)
    query, key = states(46)
    attention = (query @ key.mT).softmax(-1)
    assert torch.equal(position("bias", query, key, context), product("bias", query, key, context))
    assert torch.equal(position("value", attention, context), product("value", attention, context))


def test_offsets_beyond_the_reach_share_a_row():
    position = filled(reach=2, roles=("key",))
    query, key = states(40)
    bias = position("bias", query, key.zero_(), PositionContext((5, 8)))
    # seen from place (2, 4): all of row 2 from two columns on to the left, and so to the right
    row = bias[:, :, 20].unflatten(-1, (5, 8))
    torch.testing.assert_close(row[:, :, 2, :3], row[:, :, 2, :1].expand(-1, -1, 3))
    torch.testing.assert_close(row[:, :, 2, 6:], row[:, :, 2, 6:7].expand(-1, -1, 2))
    # each axis is clipped on its own
    assert not torch.allclose(row[:, :, 1, :3], row[:, :, 2, :3])
    assert not torch.allclose(row[:, :, 2, 2], row[:, :, 2, 3])


def test_rows_of_the_papers():
    """DeiT-S: 50 rows of 64 channels per role and layer; text: 2k + 1."""
    position = ShawPosition(384, 6)
    assert {name: tuple(p.shape) for name, p in position.named_parameters()} == {
        "tables.key": (1, 50, 64),
        "tables.value": (1, 50, 64),
    }
    text = ShawPosition(512, 8, offsets="raster", reach=16, prefix_bucket=False)
    assert text.tables["key"].shape == (1, 33, 64)


def test_roles_decide_hooks_and_tables():
    assert ShawPosition(WIDTH, HEADS).hooks == {"bias", "value"}
    for role, hook in (("key", "bias"), ("value", "value")):
        position = ShawPosition(WIDTH, HEADS, roles=(role,))
        assert position.hooks == {hook}
        assert [name for name, _ in position.named_parameters()] == [f"tables.{role}"]
