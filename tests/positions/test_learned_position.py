"""Learned absolute positions: who gets which vector, and which sizes are refused."""

from __future__ import annotations

import pytest
import torch

from vlp.positions import PositionContext, create_position
from vlp.positions.coordinates import patch_boxes
from vlp.positions.learned import LearnedBoxPosition


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


def boxed(**options):
    return LearnedBoxPosition(**{"width": 8, "places": 5} | options).double()


def edges_of(position):
    """Tables in the order of the channels, with the index of their coordinate in x0, y0, x1, y1."""
    tables = ("table_top", "table_left", "table_bottom", "table_right")
    return [(getattr(position, table), axis) for table, axis in zip(tables, (1, 0, 3, 2))]


@pytest.mark.parametrize("combine", ["concat", "sum"])
def test_a_box_takes_the_vectors_of_its_four_edges(combine):
    position = boxed(combine=combine)
    # every fifth lies exactly on a line; the others are at least 1e-3 from the middle of two lines
    boxes = torch.tensor([[0.0, 0.25, 0.5, 1.0], [0.12, 0.13, 0.37, 0.38], [0.6, 0.9, 0.1, 0.88]])
    boxes = torch.stack([boxes, boxes.flip(0)]).double()
    x = torch.randn(2, 4, 8).double()
    out = position("tokens", x, PositionContext(prefix_tokens=1, coordinates=boxes))
    assert torch.equal(out[:, 0], x[:, 0])
    for image in range(2):
        for token in range(3):
            box = boxes[image, token].tolist()
            vectors = []
            for table, axis in edges_of(position):
                line = min(range(5), key=lambda place, edge=box[axis]: abs(place / 4 - edge))
                vectors.append(table[line])
            place = torch.cat(vectors) if combine == "concat" else sum(vectors)
            torch.testing.assert_close(out[image, 1 + token], x[image, 1 + token] + place)


@pytest.mark.parametrize("grid", [(4, 4), (2, 4), (1, 1)])
def test_a_patch_is_its_own_box(grid):
    position = boxed(grid=(3, 3))
    rows, columns = grid
    tokens = torch.zeros(1, rows * columns, 8).double()
    out = position("tokens", tokens, PositionContext(grid))
    shares = patch_boxes(grid, torch.float64) / torch.tensor([columns, rows, columns, rows])
    given = position("tokens", tokens, PositionContext(coordinates=shares[None]))
    assert torch.equal(given, out)
    for row in range(rows):
        for column in range(columns):
            down, right = 4 // rows, 4 // columns  # lines from one patch to the next
            vectors = [
                position.table_top[row * down],
                position.table_left[column * right],
                position.table_bottom[(row + 1) * down],
                position.table_right[(column + 1) * right],
            ]
            torch.testing.assert_close(out[0, row * columns + column], torch.cat(vectors))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_every_edge_of_any_grid_finds_its_line(kind):
    """n + 1 places serve an n x n grid edge by edge: no rounding error moves one."""
    for n in (3, 7, 14, 24, 31, 49):
        position = LearnedBoxPosition(4, places=n + 1)
        with torch.no_grad():
            for table in position.parameters():
                table.copy_(torch.arange(n + 1)[:, None])
        tokens = torch.zeros(1, n * n, 4, dtype=kind)
        out = position("tokens", tokens, PositionContext((n, n)))[0].long().view(n, n, 4)
        row = torch.arange(n)[:, None].expand(n, n)
        edges = torch.stack([row, row.T, row + 1, row.T + 1], -1)
        assert torch.equal(out, edges)


def test_a_box_table_starts_and_learns_like_the_others():
    position = LearnedBoxPosition(64, deviation=0.5)
    assert [tuple(table.shape) for table in position.parameters()] == [(100, 16)] * 4
    for table in position.parameters():
        assert table.std().item() == pytest.approx(0.5, rel=0.1)
    tokens = torch.randn(1, 6, 8)
    start = LearnedBoxPosition(8, deviation=0)
    assert torch.equal(start("tokens", tokens, PositionContext((2, 3))), tokens)

    position = boxed()
    position("tokens", tokens.double(), PositionContext((2, 3))).sum().backward()
    # three patches begin at the top line, three in the middle one, and so on
    assert position.table_top.grad[:, 0].tolist() == [3, 0, 3, 0, 0]
    assert position.table_bottom.grad[:, 0].tolist() == [0, 0, 3, 0, 3]


def test_edges_just_outside_belong_to_the_last_lines():
    position = boxed(places=2000)
    boxes = torch.tensor([[[-0.0009, 0.0, 1.0, 1.0009]]]).double()
    out = position("tokens", torch.zeros(1, 1, 8).double(), PositionContext(coordinates=boxes))
    ends = [(position.table_top, 0), (position.table_left, 0)]
    ends += [(position.table_bottom, -1), (position.table_right, -1)]
    assert torch.equal(out[0, 0], torch.cat([table[line] for table, line in ends]))
