import pytest
import torch

from vlp.positions import PositionContext, create_fitting_position
from vlp.positions.coordinates import (
    patch_boxes,
    patch_centres,
    require_grid_tokens,
    sequence_length,
    token_coordinates,
)


def tokens(count, batch=2, kind=torch.float64):
    return torch.zeros(batch, count, 8, dtype=kind)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("extent", [None, 1.0, 100.0])
@pytest.mark.parametrize("dimensions", [2, 4])
def test_units_on_a_grid(dimensions, extent, prefix):
    rows, columns = grid = (2, 5)
    x, context = tokens(prefix + 10), PositionContext(grid, prefix)
    found = token_coordinates("test", dimensions, x, context, extent=extent)
    assert found.shape == (1, 10, dimensions)
    across, down = (1, 1) if extent is None else (extent / columns, extent / rows)
    for row in range(rows):
        for column in range(columns):
            if dimensions == 4:
                expected = [column * across, row * down, (column + 1) * across, (row + 1) * down]
            else:
                centre = 0 if extent is None else 0.5
                expected = [(column + centre) * across, (row + centre) * down]
            expected = torch.tensor(expected, dtype=torch.float64)
            patch = found[0, row * columns + column]
            torch.testing.assert_close(patch, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("extent", [None, 7.0])
@pytest.mark.parametrize("dimensions", [2, 4])
def test_given_places_at_the_patches_are_the_patches(dimensions, extent):
    rows, columns = grid = (3, 5)
    make = patch_centres if dimensions == 2 else patch_boxes
    shares = make(grid, torch.float64, torch.device("cpu"))
    shares = shares / torch.tensor([columns, rows] * (dimensions // 2))
    order = torch.randperm(15)
    x = tokens(16)
    on_grid = token_coordinates("test", dimensions, x, PositionContext(grid, 1), extent=extent)
    context = PositionContext(grid, 1, coordinates=shares[order].expand(2, -1, -1))
    given = token_coordinates("test", dimensions, x, context, extent=extent)
    torch.testing.assert_close(given, on_grid[:, order].expand(2, -1, -1), rtol=0, atol=1e-12)
    # the grid may come from the options, too, and with an extent there need be none
    context = PositionContext(None, 1, coordinates=shares[None, order])
    own = None if extent is not None else grid
    again = token_coordinates("test", dimensions, x, context, own, extent)
    assert torch.equal(again, given[:1])


def test_kind_and_gradient():
    for kind in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        expected = torch.promote_types(kind, torch.float32)
        x = tokens(6, kind=kind)
        assert token_coordinates("test", 2, x, PositionContext((2, 3))).dtype == expected
        shares = torch.rand(1, 6, 2, dtype=torch.bfloat16, requires_grad=True)
        context = PositionContext((2, 3), coordinates=shares)
        found = token_coordinates("test", 2, x, context)
        assert found.dtype == expected
        found.sum().backward()
        assert shares.grad.unique().tolist() == [2, 3]


def test_places_after_the_prefix():
    assert sequence_length("test", tokens(6), PositionContext(prefix_tokens=2)) == 4
    with pytest.raises(ValueError, match="test: 3 prefix tokens are more than the 2 tokens"):
        sequence_length("test", tokens(2), PositionContext(prefix_tokens=3))
    with pytest.raises(ValueError, match=r"test: .* 2 x 3 grid are 8 tokens, not 6"):
        sequence_length("test", tokens(6), PositionContext((2, 3), 2))


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (PositionContext(), "test needs a grid"),
        (PositionContext((2, 3), 1), "1 prefix tokens and a 2 x 3 grid are 7 tokens, not 6"),
        (PositionContext((0, 3), 6), "a grid of 0 x 3 has no patches"),
        (PositionContext(coordinates=torch.rand(1, 6, 2)), "test counts in patches"),
        (PositionContext((2, 3), coordinates=torch.rand(3, 6, 2)), r"\(2 or 1, 6, 2\).*\(3, 6, 2"),
        (PositionContext((2, 3), coordinates=torch.rand(1, 6, 4)), r"\(2 or 1, 6, 2\).*\(1, 6, 4"),
        (PositionContext((2, 3), 1, torch.rand(1, 6, 2)), r"\(2 or 1, 5, 2\).*\(1, 6, 2"),
        (PositionContext((2, 3), coordinates=torch.rand(6, 2)), r"not \(6, 2\)"),
        (
            PositionContext((2, 3), coordinates=torch.linspace(0, 224, 12).view(1, 6, 2)),
            r"shares of the image in \[0, 1\], not 0 to 224",
        ),
        (PositionContext((2, 3), coordinates=torch.full((1, 6, 2), -0.1)), "not -0.1 to -0.1"),
        (PositionContext((2, 3), coordinates=torch.full((1, 6, 2), float("nan"))), "not nan"),
    ],
)
def test_places_that_cannot_be_used_are_named(context, message):
    with pytest.raises(ValueError, match=message):
        token_coordinates("test", 2, tokens(6), context)


def test_rounding_errors_of_shares_are_no_error():
    shares = torch.tensor([[[0.0, 0.7], [1.0000001, -1e-6]]])
    token_coordinates("test", 2, tokens(2), PositionContext(coordinates=shares), extent=1.0)


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


@pytest.mark.parametrize(
    "name",
    [
        *("alibi-2d", "irpe-product", "irpe-quantization", "shaw", "huang", "sasa", "sape"),
        *("transformer-xl", "learned-1d", "learned-2d", "object"),
    ],
)
def test_as_many_tokens_with_coordinates_are_no_grid(name):
    encoding = create_fitting_position(name, {"width": 16, "heads": 2, "grid": (4, 4)})
    (hook,) = encoding.hooks & {"tokens", "bias"}
    states = [torch.randn(1, 16, 16)] if hook == "tokens" else [torch.randn(1, 2, 16, 8)] * 2
    assert encoding(hook, *states, PositionContext()).isfinite().all()
    with pytest.raises(ValueError, match=f"{name} needs a grid, but these tokens have coordinates"):
        encoding(hook, *states, PositionContext(coordinates=torch.rand(1, 16, 2)))
