"""Huang's bias against Eq. 11 as printed, pair by pair."""

from __future__ import annotations

import pytest
import torch

from vlp.positions import PositionContext
from vlp.positions.clipped import clipped_ids
from vlp.positions.huang import HuangPosition, huang_lookups
from vlp.positions.irpe import RelativePosition
from vlp.positions.lookup import dense

WIDTH, HEADS, DEPTH = 8, 2, 4


def filled(**options):
    position = HuangPosition(WIDTH, HEADS, **options).double()
    torch.nn.init.normal_(position.table)
    return position


def states(tokens):
    return torch.randn(2, 2, HEADS, tokens, DEPTH).double()


def equation_11(query, key, table, row):
    """Logits with their 1/sqrt(d), by a loop over pairs; row(i, j) names the table's row."""
    table = table.expand(HEADS, -1, -1)
    batch, heads, tokens, depth = query.shape
    logits = torch.zeros(batch, heads, tokens, tokens).double()
    for i in range(tokens):
        for j in range(tokens):
            p = table[:, row(i, j)]
            product = ((query[:, :, i] + p) * (key[:, :, j] + p)).sum(-1) - (p * p).sum(-1)
            logits[:, :, i, j] = product / depth**0.5
    return logits


def row_of(grid, prefix, reach, raster=False):
    def clip(x):
        return max(-reach, min(reach, x)) + reach

    def row(i, j):
        a, b = i - prefix, j - prefix
        if min(a, b) < 0:
            return -1
        if raster:
            return clip(a - b)
        down, right = a // grid[1] - b // grid[1], a % grid[1] - b % grid[1]
        return clip(down) * (2 * reach + 1) + clip(right)

    return row


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("offsets", ["product", "raster"])
@pytest.mark.parametrize("reach", [1, 3])
def test_logits_are_equation_11(reach, offsets, shared):
    position = filled(reach=reach, offsets=offsets, shared_heads=shared)
    for grid, prefix in [((3, 4), 1), ((2, 6), 2), ((1, 5), 0), ((1, 1), 1)]:
        query, key = states(prefix + grid[0] * grid[1])
        row = row_of(grid, prefix, reach, offsets == "raster")
        bias = position("bias", query, key, PositionContext(grid, prefix))
        torch.testing.assert_close(
            query @ key.mT / DEPTH**0.5 + bias,
            equation_11(query, key, position.table, row),
            rtol=0,
            atol=1e-12,
        )


def test_on_images_it_is_clipped_product_on_queries_and_keys_with_one_table():
    position = filled()
    product = RelativePosition(
        "product", WIDTH, HEADS, roles=("query", "key"), function="clip"
    ).double()
    for table in product.tables.values():
        table.data.copy_(position.table)
    query, key = states(46)
    context = PositionContext((5, 9), 1)
    torch.testing.assert_close(
        position("bias", query, key, context),
        product("bias", query, key, context),
        rtol=0,
        atol=1e-12,
    )


def test_queries_and_keys_trade_places_in_the_mirror():
    """p_ji is p_ij with both axes turned: the transposed bias is that of the mirrored table."""
    position = filled(reach=2, prefix_bucket=False)
    query, key = states(20)
    ids, _ = clipped_ids("product", 4, 5, 2)
    there = dense(huang_lookups(query, key, position.table, ids)).mT
    back = dense(huang_lookups(key, query, position.table.flip(1), ids))
    torch.testing.assert_close(there, back, rtol=0, atol=1e-12)
