"""Which tokens are a prefix and a grid."""

from __future__ import annotations

import pytest
import torch

from vlp.positions import PositionContext, create_fitting_position
from vlp.positions.coordinates import require_grid_tokens

BOUND = (
    *("alibi-2d", "irpe-cross", "irpe-euclidean", "irpe-product", "irpe-quantization", "shaw"),
    *("huang", "sasa", "transformer-xl", "sape", "learned-1d", "learned-2d", "object"),
)


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


@pytest.mark.parametrize("name", BOUND)
def test_as_many_tokens_with_coordinates_are_no_grid(name):
    encoding = create_fitting_position(name, {"width": 16, "heads": 2, "grid": (4, 4)})
    (hook,) = encoding.hooks & {"tokens", "bias"}
    states = [torch.randn(1, 16, 16)] if hook == "tokens" else [torch.randn(1, 2, 16, 8)] * 2
    assert encoding(hook, *states, PositionContext()).isfinite().all()
    with pytest.raises(ValueError, match=f"{name} needs a grid, but these tokens have coordinates"):
        encoding(hook, *states, PositionContext(coordinates=torch.rand(1, 16, 2)))
