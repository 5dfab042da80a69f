import math

import pytest
import torch

from vlp.positions.alibi2d import DirectionalDistance, bias, slopes
from vlp.positions.base import PositionContext

HEADS = 3


def code_slopes(heads, start):
    if math.log2(heads).is_integer():
        return [2**-start / 2**head for head in range(heads)]
    whole = 2 ** math.floor(math.log2(heads))
    return code_slopes(whole, start) + code_slopes(2 * whole, start)[0::2][: heads - whole]


def by_loop(height, width, slope, diagonals=1.0):
    """Minus slope times distance; `diagonals` is what keys to the right in other rows get."""
    heads = len(slope[0])
    out = torch.zeros(heads, height * width, height * width).double()
    for i in range(height * width):
        for j in range(height * width):
            (row, column), (key_row, key_column) = divmod(i, width), divmod(j, width)
            distance = abs(row - key_row) + abs(column - key_column)
            if key_column > column and key_row != row:
                distance *= diagonals
            side = 0 if j <= i else 1
            for head in range(heads):
                out[head, i, j] = -slope[side][head] * distance
    return out


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12])
def test_slopes_are_the_printed_geometric_sequences(heads):
    expected = [[2**-s * 2 ** (-8 / heads * head) for head in range(heads)] for s in (1, 0.5)]
    assert slopes(heads).shape == (2, heads)
    for row, line in zip(slopes(heads).tolist(), expected, strict=True):
        assert row == pytest.approx(line, rel=1e-14)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 7, 8, 12, 16, 20])
def test_slopes_of_the_authors_code(heads):
    for row, start in zip(slopes(heads, "code").tolist(), (1, 0.5), strict=True):
        assert row == pytest.approx(code_slopes(heads, start), rel=1e-14)


@pytest.mark.parametrize("ratio", ["paper", "code"])
@pytest.mark.parametrize("grid", [(3, 4), (4, 2), (1, 5), (5, 1), (1, 1)])
def test_bias_is_equation_12(grid, ratio):
    expected = by_loop(*grid, slopes(HEADS, ratio).tolist())
    torch.testing.assert_close(bias(*grid, HEADS, ratio), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("grid", [(3, 4), (4, 2), (1, 5)])
def test_the_variant_with_four_slopes(grid):
    expected = by_loop(*grid, slopes(HEADS).tolist(), diagonals=2**0.25)
    found = bias(*grid, HEADS, variant="four-diagonal")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("variant", ["two-slope", "four-diagonal"])
@pytest.mark.parametrize("prefix", [0, 2])
def test_a_prefix_has_no_bias(prefix, variant):
    grid = (3, 4)
    position = DirectionalDistance(heads=HEADS, ratio="code", variant=variant)
    assert position.hooks == {"bias"}
    query = torch.randn(2, HEADS, prefix + 12, 4).double()
    found = position("bias", query, query, PositionContext(grid, prefix))
    assert found.shape == (1, HEADS, prefix + 12, prefix + 12)
    assert torch.equal(found[0, :, prefix:, prefix:], bias(*grid, HEADS, "code", variant))
    assert (found[:, :, :prefix] == 0).all()
    assert (found[..., :prefix] == 0).all()
