"""Learned absolute positions: who gets which vector, and which sizes are refused."""

from __future__ import annotations

import pytest
import torch

from vlp.positions import PositionContext, create_position, list_positions


def test_a_sequence_takes_the_first_vectors_after_its_prefix():
    position = create_position("learned-1d", width=4, length=6).double()
    for tokens, prefix in [(6, 0), (3, 0), (7, 1), (5, 2), (1, 1)]:
        x = torch.randn(2, tokens, 4).double()
        out = position("tokens", x, PositionContext(prefix_tokens=prefix))
        for place in range(tokens):
            added = 0 if place < prefix else position.table[place - prefix]
            torch.testing.assert_close(out[:, place], x[:, place] + added)
    assert position.hooks == {"tokens"}


@pytest.mark.parametrize("combine", ["concat", "sum"])
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("grid", [None, (3, 4), (2, 4), (3, 1)])
def test_a_grid_takes_a_row_and_a_column_vector(combine, prefix, grid):
    position = create_position("learned-2d", width=6, grid=(3, 4), combine=combine).double()
    rows, columns = grid or (3, 4)
    x = torch.randn(2, prefix + rows * columns, 6).double()
    out = position("tokens", x, PositionContext(grid, prefix))
    assert torch.equal(out[:, :prefix], x[:, :prefix])
    for row in range(rows):
        for column in range(columns):
            down, right = position.table_rows[row], position.table_columns[column]
            place = down + right if combine == "sum" else torch.cat([down, right])
            token = prefix + row * columns + column
            torch.testing.assert_close(out[:, token], x[:, token] + place)


def test_parameter_counts_of_reading_f13():
    def count(name, **options):
        parameters = create_position(name, width=768, **options).parameters()
        return sum(parameter.numel() for parameter in parameters)

    assert count("learned-2d", grid=(64, 64)) == 49_152
    assert count("learned-1d", grid=(14, 14)) == 196 * 768


@pytest.mark.parametrize(("name", "size"), [("learned-1d", {"length": 300}), ("learned-2d", {})])
def test_the_start_has_the_asked_deviation(name, size):
    size = size or {"grid": (20, 20)}
    for deviation in (0.02, 0.5):
        position = create_position(name, width=64, deviation=deviation, **size)
        for table in position.parameters():
            assert table.std().item() == pytest.approx(deviation, rel=0.1)
    tokens = torch.randn(1, 6, 64)
    start = create_position(name, width=64, deviation=0, **size)
    assert torch.equal(start("tokens", tokens, PositionContext((2, 3))), tokens)
    default = create_position(name, width=64, **size)
    assert next(default.parameters()).std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(("name", "size"), [("learned-1d", {"length": 6}), ("learned-2d", {})])
def test_the_kind_of_the_tokens_stays_and_gradients_reach_the_tables(name, size):
    position = create_position(name, width=4, **(size or {"grid": (2, 3)}))
    for kind in (torch.bfloat16, torch.float32, torch.float64):
        position.zero_grad()
        x = torch.zeros(3, 7, 4, dtype=kind)
        out = position("tokens", x, PositionContext((2, 3), 1))
        assert out.dtype == kind
        out.sum().backward()
        # every table row serves as many (batch, place) pairs as its share of the six patches
        for table in position.parameters():
            assert table.grad.eq(18 / len(table)).all()


def test_too_many_or_too_few_tokens_are_an_error():
    position = create_position("learned-1d", width=4, length=5)
    with pytest.raises(
        ValueError, match=r"learned-1d has 5 places, .* 7 tokens of which 1 are pre"
    ):
        position("tokens", torch.zeros(1, 7, 4), PositionContext(prefix_tokens=1))
    with pytest.raises(
        ValueError, match=r"learned-1d has 5 places, .* 1 tokens of which 2 are pre"
    ):
        position("tokens", torch.zeros(1, 1, 4), PositionContext(prefix_tokens=2))


def test_raster_order_is_bound_to_its_grid():
    position = create_position("learned-1d", width=4, grid=(2, 3))
    x = torch.zeros(1, 6, 4)
    position("tokens", x, PositionContext((2, 3)))
    with pytest.raises(ValueError, match="learned-1d was made for a 2 x 3 grid, not 3 x 2"):
        position("tokens", x, PositionContext((3, 2)))


def test_a_grid_beyond_the_tables_is_an_error():
    position = create_position("learned-2d", width=4, grid=(2, 3))
    for grid in [(3, 2), (1, 4)]:
        asked = f"{grid[0]} x {grid[1]}"
        with pytest.raises(ValueError, match=f"learned-2d has .* a 2 x 3 grid, not for {asked}"):
            position("tokens", torch.zeros(1, grid[0] * grid[1], 4), PositionContext(grid))
    with pytest.raises(ValueError, match=r"learned-2d: 1 prefix .* 2 x 3 grid are 7 tokens, not 6"):
        position("tokens", torch.zeros(1, 6, 4), PositionContext((2, 3), 1))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("learned-1d", {}, "needs a positive length or a grid"),
        ("learned-1d", {"length": 0}, "not length 0"),
        ("learned-1d", {"length": 5, "grid": (2, 3)}, r"not length 5 and grid \(2, 3\)"),
        ("learned-1d", {"length": 5, "deviation": -1}, "learned-1d: the deviation .* not -1"),
        ("learned-2d", {"grid": (2, 3), "width": 5}, "width 5 has no halves"),
        ("learned-2d", {"grid": (2, 3), "combine": "product"}, "combine 'product'"),
        ("learned-2d", {"grid": (0, 3)}, "0 x 3 has no patches"),
        ("learned-2d", {"grid": (2, 3), "deviation": -1}, "learned-2d: the deviation .* not -1"),
        ("learned-2d", {"length": 6}, "'learned-2d': .*options: width, grid"),
    ],
)
def test_impossible_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        create_position(name, **{"width": 4} | options)


def test_registered_names():
    assert {"anchor", "uniform", "learned-1d", "learned-2d", "irpe-product"} <= set(
        list_positions()
    )
