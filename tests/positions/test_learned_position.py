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


@pytest.mark.parametrize(
    ("name", "size"),
    [("learned-1d", {"length": 300}), ("learned-2d", {"grid": (20, 20)}), ("learned-4d", {})],
)
def test_the_start_has_its_deviation(name, size):
    for options in ({}, {"deviation": 0.5}, {"deviation": 0}):
        position = create_position(name, width=64, **size, **options)
        for table in position.parameters():
            expected = options.get("deviation", 0.02)
            assert table.std().item() == pytest.approx(expected, rel=0.1)


def test_grids_and_tokens_that_do_not_fit_are_named():
    sequence = create_position("learned-1d", width=4, length=5)
    for tokens, prefix in ((7, 1), (1, 2)):
        with pytest.raises(ValueError, match=f"5 positions, .* {tokens} tokens of .* {prefix} are"):
            sequence("tokens", torch.zeros(1, tokens, 4), PositionContext(prefix_tokens=prefix))
    raster, grid = (create_position(f"learned-{n}d", width=4, grid=(2, 3)) for n in (1, 2))
    x = torch.zeros(1, 6, 4)
    raster("tokens", x, PositionContext((2, 3)))
    with pytest.raises(ValueError, match="learned-1d has a table for a 2 x 3 grid, not 3 x 2"):
        raster("tokens", x, PositionContext((3, 2)))
    for rows, columns in ((3, 2), (1, 4)):
        with pytest.raises(ValueError, match=f"a 2 x 3 grid, not for {rows} x {columns}"):
            grid("tokens", torch.zeros(1, rows * columns, 4), PositionContext((rows, columns)))
    with pytest.raises(ValueError, match=r"learned-2d: 1 prefix .* 2 x 3 grid are 7 tokens, not 6"):
        grid("tokens", x, PositionContext((2, 3), 1))


def boxed(**options):
    return LearnedBoxPosition(**{"width": 8, "places": 5} | options).double()


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
            for edge, axis in (("top", 1), ("left", 0), ("bottom", 3), ("right", 2)):
                line = min(range(5), key=lambda place, x=box[axis]: abs(place / 4 - x))
                vectors.append(getattr(position, f"table_{edge}")[line])
            place = torch.cat(vectors) if combine == "concat" else sum(vectors)
            torch.testing.assert_close(out[image, 1 + token], x[image, 1 + token] + place)


@pytest.mark.parametrize("grid", [(4, 4), (2, 4), (1, 1)])
def test_a_patch_is_its_own_box(grid):
    position = boxed(grid=(3, 3))
    rows, columns = grid
    tokens = torch.zeros(1, rows * columns, 8).double()
    out = position("tokens", tokens, PositionContext(grid))
    shares = patch_boxes(grid, torch.float64, torch.device("cpu"))
    shares /= torch.tensor([columns, rows, columns, rows])
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


def test_a_box_table_has_a_row_for_each_line():
    shapes = [tuple(table.shape) for table in LearnedBoxPosition(64).parameters()]
    assert shapes == [(100, 16)] * 4


def test_edges_just_outside_belong_to_the_last_lines():
    position = boxed(places=2000)
    boxes = torch.tensor([[[-0.0009, 0.0, 1.0, 1.0009]]]).double()
    out = position("tokens", torch.zeros(1, 1, 8).double(), PositionContext(coordinates=boxes))
    ends = [(position.table_top, 0), (position.table_left, 0)]
    ends += [(position.table_bottom, -1), (position.table_right, -1)]
    assert torch.equal(out[0, 0], torch.cat([table[line] for table, line in ends]))
