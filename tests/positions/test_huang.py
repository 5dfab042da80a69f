"""Huang's bias against Eq. 11 as printed, pair by pair."""

from __future__ import annotations

import copy

import pytest
import torch

from vlp.layers.attention import Attention
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


@pytest.mark.parametrize("fused", [True, False])
def test_inside_attention(fused):
    position, grid = filled(reach=1), (2, 3)
    layer = Attention(WIDTH, HEADS, positions=[position], fused=fused).double()
    x = torch.randn(2, 7, WIDTH).double()
    query, key, value = (
        part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for part in (layer.query, layer.key, layer.value)
    )
    logits = equation_11(query, key, position.table, row_of(grid, 1, 1))
    out = (logits.softmax(-1) @ value).transpose(1, 2).flatten(-2)
    torch.testing.assert_close(layer(x, context=PositionContext(grid, 1)), layer.output(out))


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


def test_one_table_serves_every_grid():
    position = filled()
    query, key = states(48)
    inside = ((torch.arange(2)[:, None] + 3) * 8 + torch.arange(3) + 4).flatten()
    large = position("bias", query, key, PositionContext((6, 8)))[:, :, inside][..., inside]
    small = position("bias", query[:, :, inside], key[:, :, inside], PositionContext((2, 3)))
    torch.testing.assert_close(large, small, rtol=0, atol=1e-12)


def test_the_start_changes_nothing():
    plain = Attention(WIDTH, HEADS)
    position = HuangPosition(WIDTH, HEADS)
    layer = Attention(WIDTH, HEADS, positions=[position])
    layer.load_state_dict(plain.state_dict(), strict=False)
    x, context = torch.randn(2, 7, WIDTH), PositionContext((2, 3), 1)
    assert position.hooks == {"bias"}
    assert torch.equal(layer(x, context=context), plain(x))
    layer(x, context=context).square().sum().backward()
    assert position.table.grad.abs().sum() > 0
    assert HuangPosition(384, 6).table.shape == (1, 50, 64)
    assert HuangPosition(384, 6, shared_heads=False, reach=5).table.shape == (6, 122, 64)


def test_gradients():
    query, key = (x[:1].requires_grad_() for x in states(5))
    table = torch.randn(HEADS, 10, DEPTH).double().requires_grad_()
    ids, _ = clipped_ids("product", 2, 2, 1, 1)
    assert torch.autograd.gradcheck(
        lambda query, key, table: dense(huang_lookups(query, key, table, ids)), (query, key, table)
    )


def test_bfloat16_autocast_stays_near_float64():
    layer = Attention(WIDTH, HEADS, positions=[filled()]).double()
    x, context = torch.randn(2, 13, WIDTH).double(), PositionContext((3, 4), 1)
    expected = layer(x, context=context)
    low = copy.deepcopy(layer).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = low(x.float(), context=context)
    torch.testing.assert_close(out.double(), expected, rtol=0.05, atol=0.1)
    out.float().sum().backward()
    assert low.positions[0].table.grad.dtype == torch.float32
    assert low.positions[0].table.grad.isfinite().all()


def test_wrong_tokens_and_options_are_named():
    with pytest.raises(ValueError, match=r"huang: 1 prefix .* 2 x 3 grid are 7 tokens .* not 6"):
        filled()("bias", *states(6), PositionContext((2, 3), 1))
    with pytest.raises(ValueError, match="huang: 1 prefix tokens, but prefix_bucket is False"):
        filled(prefix_bucket=False)("bias", *states(7), PositionContext((2, 3), 1))
    with pytest.raises(ValueError, match="huang: unknown offsets 'axes'; one of product, raster"):
        filled(offsets="axes")
