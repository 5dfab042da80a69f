import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlp.positions.clipped import ClippedPosition, clipped_ids, clipped_size, longest_offset


def clip(offset, reach):
    return max(-reach, min(reach, offset)) + reach


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), st.integers(0, 2))
def test_ids_are_clipped_offsets(height, width, reach, prefix):
    side = 2 * reach + 1
    sizes = {"product": side**2, "axes": side, "raster": side}
    for offsets, rows in sizes.items():
        ids, size = clipped_ids(offsets, height, width, reach, prefix)
        tokens = prefix + height * width
        assert size == clipped_size(offsets, reach, prefix) == rows + (prefix > 0)
        assert ids.shape == (2 if offsets == "axes" else 1, tokens, tokens)
        for i in range(tokens):
            for j in range(tokens):
                if min(i, j) < prefix:
                    assert ids[:, i, j].eq(size - 1).all()
                    continue
                a, b = i - prefix, j - prefix
                down = clip(a // width - b // width, reach)
                right = clip(a % width - b % width, reach)
                expected = {
                    "product": [down * side + right],
                    "axes": [down, right],
                    "raster": [clip(a - b, reach)],
                }
                assert ids[:, i, j].tolist() == expected[offsets]


@pytest.mark.parametrize("grid", [(1, 1), (3, 4), (5, 2), (1, 6)])
@pytest.mark.parametrize("offsets", ["product", "axes", "raster"])
def test_nothing_is_clipped_at_the_longest_offset(offsets, grid):
    reach = longest_offset(offsets, grid)
    further = clipped_ids(offsets, *grid, reach + 1)[0].unique(return_counts=True)[1]
    assert torch.equal(clipped_ids(offsets, *grid, reach)[0].unique(return_counts=True)[1], further)
    if reach > 1:
        nearer = clipped_ids(offsets, *grid, reach - 1)[0].unique().numel()
        assert nearer < further.numel()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cross", 2, 2, 3), "offsets 'cross'; one of product, axes, raster"),
        (("product", 2, 2, 0), "whole number from 1 on: 0"),
        (("axes", 2, 2, 2.5), "whole number from 1 on: 2.5"),
        (("raster", -2, -3, 3), "grid of -2 x -3 has no patches"),
        (("product", 0, 3, 3), "grid of 0 x 3 has no patches"),
        (("product", 2, 2, 3, -1), "prefix_tokens must not be negative, not -1"),
    ],
)
def test_impossible_ids_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        clipped_ids(*arguments)


def test_reach_none_goes_by_the_grid():
    def encoding(grid, offsets="product", reach=None, prefix_bucket=True):
        return ClippedPosition("clipped", 8, 2, grid, offsets, reach, True, prefix_bucket)

    assert encoding((2, 7)).reach == encoding((7, 2)).reach == 6
    assert encoding((2, 7), "raster").reach == 13
    assert encoding((1, 1)).reach == 1
    assert encoding(None, reach=3).size == 50
    assert encoding(None, reach=3, prefix_bucket=False).size == 49
