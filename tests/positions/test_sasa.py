"""SASA's concatenated row and column vectors against Eq. 12, pair by pair."""

from __future__ import annotations

import copy

import pytest
import torch

from vlp.positions import PositionContext
from vlp.positions.sasa import SasaPosition

WIDTH, HEADS, DEPTH = 8, 2, 4


def filled(grid=(3, 4), **options):
    position = SasaPosition(WIDTH, HEADS, grid, **options).double()
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)
    return position


def states(tokens):
    return torch.randn(2, 2, HEADS, tokens, DEPTH).double()


def pair_vectors(position, grid, prefix):
    """concat(p_dx, p_dy) as (heads, T, T, head width), by a loop over pairs."""
    reach = position.reach
    table_x, table_y = (
        table.expand(HEADS, -1, -1) for table in (position.table_x, position.table_y)
    )

    def clip(x):
        return max(-reach, min(reach, x)) + reach

    tokens = prefix + grid[0] * grid[1]
    vectors = torch.zeros(HEADS, tokens, tokens, DEPTH).double()
    for i in range(tokens):
        for j in range(tokens):
            if min(i, j) < prefix:
                dx = dy = -1
            else:
                a, b = i - prefix, j - prefix
                dx, dy = clip(a % grid[1] - b % grid[1]), clip(a // grid[1] - b // grid[1])
            vectors[:, i, j] = torch.cat([table_x[:, dx], table_y[:, dy]], -1)
    return vectors


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("reach", [None, 1])
def test_bias_is_equation_12(reach, shared):
    position = filled(reach=reach, shared_heads=shared)
    for grid, prefix in [((3, 4), 1), ((4, 3), 0), ((2, 7), 2), ((1, 5), 0), ((1, 1), 1)]:
        query, key = states(prefix + grid[0] * grid[1])
        vectors = pair_vectors(position, grid, prefix)
        torch.testing.assert_close(
            position("bias", query, key, PositionContext(grid, prefix)),
            torch.einsum("bhid,hijd->bhij", query, vectors) / DEPTH**0.5,
            rtol=0,
            atol=1e-12,
        )


def test_the_first_half_of_the_channels_is_horizontal():
    position = filled()
    query, key = states(12)
    query[..., DEPTH // 2 :] = 0
    bias = position("bias", query, key, PositionContext((3, 4))).unflatten(-1, (3, 4))
    torch.testing.assert_close(bias, bias[..., :1, :].expand_as(bias), rtol=0, atol=1e-12)
    assert not torch.allclose(bias[..., 0], bias[..., 1])


def test_a_image_and_its_transpose_trade_tables():
    position = filled()
    query, key = states(12)
    turn = torch.arange(12).unflatten(0, (3, 4)).T.flatten()
    turned = copy.deepcopy(position)
    turned.table_x, turned.table_y = position.table_y, position.table_x
    bias = position("bias", query, key, PositionContext((3, 4)))
    halves_swapped = query[:, :, turn].roll(DEPTH // 2, -1)
    other = turned("bias", halves_swapped, key[:, :, turn], PositionContext((4, 3)))
    torch.testing.assert_close(other, bias[:, :, turn][..., turn], rtol=0, atol=1e-12)


def test_the_trained_grid_is_not_clipped_and_larger_ones_are():
    """Every offset of the trained grid has its own row; further ones share the furthest row."""
    assert filled((3, 4)).reach == filled((4, 3)).reach == 3
    position = filled((2, 4))
    query, key = states(16)
    row = position("bias", query, key, PositionContext((2, 8)))[:, :, 0].unflatten(-1, (2, 8))
    assert (row[..., :4].diff(dim=-1).abs() > 1e-6).all()
    torch.testing.assert_close(row[..., 3:], row[..., 3:4].expand(-1, -1, -1, 5))


def test_tables_of_14_x_14_patches():
    """27 offsets and a prefix per axis, 32 of 64 channels: what Table 5 of iRPE counts."""
    position = SasaPosition(384, 6, (14, 14))
    assert position.table_x.shape == position.table_y.shape == (1, 28, 32)
    assert SasaPosition(384, 6, reach=5, shared_heads=False).table_x.shape == (6, 12, 32)
