import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sinusoids_by_hand import added, close, slow_sinusoid

from vlp.positions import PositionContext
from vlp.positions.object import ObjectPosition, object_ids


def painted(boxes, grid):
    cells = [[0] * grid[1] for _ in range(grid[0])]
    for number, (x, y, width, height) in enumerate(boxes, start=1):
        for row in range(grid[0]):
            for column in range(grid[1]):
                across = min(x + width, column + 1) - max(x, column)
                down = min(y + height, row + 1) - max(y, row)
                if across > 0 and down > 0:
                    cells[row][column] = number
    return cells


@st.composite
def images(draw):
    grid = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    boxes = []
    for _ in range(draw(st.integers(0, 4))):
        # quarters of a cell, exact in binary
        left, right = sorted(draw(st.tuples(*[st.integers(0, 4 * grid[1])] * 2)))
        top, bottom = sorted(draw(st.tuples(*[st.integers(0, 4 * grid[0])] * 2)))
        boxes.append([left / 4, top / 4, (right - left) / 4, (bottom - top) / 4])
    return grid, boxes


@settings(deadline=None, max_examples=80)
@given(images())
def test_painting_covers_every_touched_cell_and_later_boxes_win(image):
    grid, boxes = image
    found = object_ids(torch.tensor(boxes).reshape(1, -1, 4), grid)
    assert found.dtype == torch.int64
    assert found[0].tolist() == painted(boxes, grid)


def test_rounding_errors_neither_spill_over_nor_refuse():
    third = torch.tensor([[0.1 * 3 * 10, 0.0, 1.0000001, 2.0000002]])
    assert object_ids(third, (2, 4)).tolist() == [[0, 0, 0, 1]] * 2
    half = torch.tensor([[0.1, 0.1, 0.2, 0.2]], dtype=torch.bfloat16)
    assert object_ids(half, (1, 2)).tolist() == [[1, 0]]


@pytest.mark.parametrize(
    ("box", "values"),
    [
        ([3, 0, 2, 1], "3, 0, 2, 1"),
        ([0, 2, 1, 2], "0, 2, 1, 2"),
        ([-1, 0, 2, 1], "-1, 0, 2, 1"),
        ([0, -1, 1, 2], "0, -1, 1, 2"),
        ([2, 1, -1, 1], "2, 1, -1, 1"),
        ([2, 1, 1, -1], "2, 1, 1, -1"),
        ([float("nan"), 0, 1, 1], "nan, 0, 1, 1"),
        ([0, 0, float("nan"), 1], "0, 0, nan, 1"),
        ([0, 0, float("inf"), 1], "0, 0, inf, 1"),
    ],
)
def test_boxes_outside_the_grid_are_named(box, values):
    boxes = torch.tensor([[[0.0, 0, 1, 1], [0, 0, 0, 0]], [[0, 0, 1, 1], box]])
    message = rf"object box 1 of image 1 \(.*: {values}\) does not lie inside the 3 x 4 grid"
    with pytest.raises(ValueError, match=message):
        object_ids(boxes, (3, 4))


def test_boxes_of_another_shape_are_an_error():
    with pytest.raises(ValueError, match=r"\(\.\.\., K, 4\), not \(2, 5\)"):
        object_ids(torch.zeros(2, 5), (3, 4))
    with pytest.raises(ValueError, match=r"\(batch, K, 4\), not \(2, 4\)"):
        added(ObjectPosition(8), PositionContext((3, 4), boxes=torch.zeros(2, 4)), 12)


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
@pytest.mark.parametrize("prefix", [0, 1])
def test_equation_13(prefix, layout):
    rows, columns = grid = (3, 4)
    boxes = [[[0, 0, 2, 2], [1, 1, 3, 1]], [[2, 0, 2, 3], [0, 0, 0, 0]]]
    encoding = ObjectPosition(16, layout=layout)
    context = PositionContext(grid, prefix, boxes=torch.tensor(boxes))
    out = added(encoding, context, prefix + 12, batch=2)
    assert not out[:, :prefix].any()
    for image in range(2):
        ids = painted(boxes[image], grid)
        for row in range(rows):
            for column in range(columns):
                expected = slow_sinusoid(ids[row][column], 8, layout)
                expected += slow_sinusoid(column, 4, layout) + slow_sinusoid(row, 4, layout)
                close(out[image, prefix + row * columns + column], expected)
    # papers.md#vitarc-v13: without boxes half of the channels for the column, half for the row
    out = added(encoding, PositionContext(grid, prefix), prefix + 12)
    for row in range(rows):
        for column in range(columns):
            expected = slow_sinusoid(column, 8, layout) + slow_sinusoid(row, 8, layout)
            close(out[0, prefix + row * columns + column], expected)
