"""Transformer-XL's logits against Eq. 10 as printed, pair by pair."""

from __future__ import annotations

import math

import pytest
import torch

from vlp.positions import PositionContext
from vlp.positions.clipped import clipped_ids
from vlp.positions.lookup import dense
from vlp.positions.sine import sinusoid
from vlp.positions.transformer_xl import TransformerXLPosition, transformer_xl_lookups

WIDTH, HEADS, DEPTH = 8, 2, 4
CASES = [((3, 4), 1), ((2, 6), 2), ((1, 5), 0), ((1, 1), 1)]
OFFSETS = ("product", "axes", "raster")


def filled(**options):
    position = TransformerXLPosition(WIDTH, HEADS, **options).double()
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)
    return position


def states(tokens):
    return torch.randn(2, 2, HEADS, tokens, DEPTH).double()


def wave(number, width, theta=10_000.0):
    """Sines before cosines of one number."""
    angles = [number * theta ** (-2 * k / width) for k in range(width // 2)]
    return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)


def equation_10(position, query, key, grid, prefix):
    """Logits with their 1/sqrt(d), by a loop over pairs."""
    projection, u, v = (
        x.expand(HEADS, *x.shape[1:]) for x in (position.projection, position.u, position.v)
    )
    channels, reach = projection.shape[1], position.reach
    batch, heads, tokens, depth = query.shape
    logits = torch.zeros(batch, heads, tokens, tokens).double()

    def clip(x):
        return max(-reach, min(reach, x))

    for i in range(tokens):
        for j in range(tokens):
            a, b = i - prefix, j - prefix
            dx, dy = clip(a % grid[1] - b % grid[1]), clip(a // grid[1] - b // grid[1])
            if min(a, b) < 0:
                relative = position.prefix[:, 0]
            elif position.offsets == "axes":
                s = torch.cat([wave(dx, channels // 2), wave(dy, channels // 2)])
                relative = s @ projection
            elif position.offsets == "product":
                relative = wave(dy * (2 * reach + 1) + dx, channels) @ projection
            else:
                relative = wave(clip(a - b), channels) @ projection
            content = ((query[:, :, i] + u[:, 0]) * key[:, :, j]).sum(-1)
            place = ((query[:, :, i] + v[:, 0]) * relative).sum(-1)
            logits[:, :, i, j] = (content + place) / depth**0.5
    return logits


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("reach", [1, 3])
def test_logits_are_equation_10(reach, offsets, shared):
    position = filled(reach=reach, offsets=offsets, shared_heads=shared)
    for grid, prefix in CASES:
        query, key = states(prefix + grid[0] * grid[1])
        bias = position("bias", query, key, PositionContext(grid, prefix))
        torch.testing.assert_close(
            query @ key.mT / DEPTH**0.5 + bias,
            equation_10(position, query, key, grid, prefix),
            rtol=0,
            atol=1e-12,
        )


def test_options_of_the_sinusoid_reach_the_bias():
    """The layout is a permutation of W^R's rows; temperature and width are others' sinusoids."""
    halves, context = filled(sinusoid_width=6), PositionContext((2, 3), 1)
    query, key = states(7)
    bias = halves("bias", query, key, context)

    def other(order, **options):
        position = TransformerXLPosition(WIDTH, HEADS, sinusoid_width=6, **options).double()
        position.load_state_dict(halves.state_dict())
        with torch.no_grad():
            position.projection.copy_(halves.projection[:, order])
        return position("bias", query, key, context)

    interleaved = other([0, 3, 1, 4, 2, 5], layout="interleaved")
    torch.testing.assert_close(interleaved, bias, rtol=0, atol=1e-12)
    assert not torch.allclose(other(list(range(6)), temperature=100.0), bias)


def test_where_the_count_begins_is_absorbed():
    """A shifted count turns every pair of sine and cosine, as a rotation of W^R's rows does."""
    numbers, shift, half = torch.arange(-24, 25).double(), 24, 3
    projection = torch.randn(6, DEPTH).double()
    angles = shift * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    sine, cosine = angles.sin()[:, None], angles.cos()[:, None]
    on_sine, on_cosine = projection.chunk(2)
    turned = torch.cat([cosine * on_sine - sine * on_cosine, sine * on_sine + cosine * on_cosine])
    torch.testing.assert_close(
        sinusoid(numbers, 6) @ projection, sinusoid(numbers - shift, 6) @ turned
    )


@pytest.mark.parametrize("offsets", OFFSETS)
def test_beyond_the_reach_nothing_changes_and_a_longer_reach_costs_nothing(offsets):
    query, key = states(9)
    key = key[:, :, :1].expand(-1, -1, 9, -1)
    context = PositionContext((1, 9))
    short = filled(offsets=offsets, reach=3)
    row = short("bias", query, key, context)[:, :, 0]
    torch.testing.assert_close(row[..., 3:], row[..., 3:4].expand(-1, -1, 6), rtol=0, atol=1e-10)
    long = TransformerXLPosition(WIDTH, HEADS, offsets=offsets, reach=10**6).double()
    long.load_state_dict(short.state_dict())
    row = long("bias", query, key, context)[:, :, 0]
    assert (row.diff().abs() > 1e-9).all()


def test_reach_none_goes_by_the_grid():
    assert TransformerXLPosition(WIDTH, HEADS, (14, 14), reach=None).reach == 13
    with pytest.raises(ValueError, match="transformer-xl needs a reach, or a grid"):
        TransformerXLPosition(WIDTH, HEADS, reach=None)


def test_sizes():
    def sizes(**options):
        position = TransformerXLPosition(384, 6, **options)
        return {name: tuple(parameter.shape) for name, parameter in position.named_parameters()}

    vector = (1, 1, 64)
    assert sizes() == {"projection": (1, 384, 64), "u": vector, "v": vector, "prefix": vector}
    own = sizes(shared_heads=False, prefix_bucket=False)
    # as in Transformer-XL: W^R of width x width, and u, v per head
    assert own == {"projection": (6, 384, 64), "u": (6, 1, 64), "v": (6, 1, 64)}
    assert sizes(sinusoid_width=64)["projection"] == (1, 64, 64)


def test_the_pure_function_knows_no_sinusoids():
    query, key = states(4)
    relative = torch.randn(1, 3, DEPTH).double()
    u, v = torch.randn(2, 1, 1, DEPTH).double()
    ids, _ = clipped_ids("raster", 2, 2, 1)
    vectors = relative[0][ids[0]]
    expected = (u * key)[:, :, None].sum(-1) + ((query + v)[:, :, :, None] * vectors).sum(-1)
    torch.testing.assert_close(
        dense(transformer_xl_lookups(query, key, relative, ids, u, v)), expected / DEPTH**0.5
    )
