"""Which tokens are a prefix and a grid."""

from __future__ import annotations

import pytest

from vlp.positions import PositionContext
from vlp.positions.grid_tokens import require_grid_tokens


def test_the_grid_of_the_context_comes_before_that_of_the_options():
    assert require_grid_tokens("x", PositionContext((2, 3), 1), (3, 4), 7, 7) == (2, 3)
    assert require_grid_tokens("x", PositionContext(prefix_tokens=2), (3, 4), 14, 14) == (3, 4)
    assert require_grid_tokens("x", PositionContext((2, 3)), None, 6, 6, False) == (2, 3)


@pytest.mark.parametrize(
    ("context", "queries", "keys", "message"),
    [
        (PositionContext(), 6, 6, "x needs a grid, in its options or in the context"),
        (PositionContext((2, 3), 1), 7, 7, "x: 1 prefix tokens, but prefix_bucket is False"),
        (PositionContext((2, 3)), 6, 7, "x: 0 prefix .* 2 x 3 grid are 6 tokens .* 6 .* 7 keys"),
        (PositionContext((2, 3)), 5, 6, "x: 0 prefix .* 2 x 3 grid are 6 tokens .* 5 .* 6 keys"),
    ],
)
def test_other_tokens_are_named(context, queries, keys, message):
    with pytest.raises(ValueError, match=message):
        require_grid_tokens("x", context, None, queries, keys, prefix_bucket=False)
