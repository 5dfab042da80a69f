from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp.data.text.word_boxes import patches_in_box


@given(st.integers(1, 6), st.integers(1, 6), st.integers(4, 40), st.integers(4, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_patches_equal_a_loop_over_centres(rows, columns, width, height, data):
    x, y = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    w, h = data.draw(st.integers(1, width - x)), data.draw(st.integers(1, height - y))
    expected = []
    for row in range(rows):
        for column in range(columns):
            # Compared as whole numbers: centre (2 row + 1) height / (2 rows).
            down, across = (2 * row + 1) * height, (2 * column + 1) * width
            inside_down = 2 * rows * y <= down < 2 * rows * (y + h)
            expected.append(inside_down and 2 * columns * x <= across < 2 * columns * (x + w))
    inside = patches_in_box((x, y, w, h), (rows, columns), (width, height))
    assert inside.shape == (rows * columns,)
    if any(expected):
        assert inside.tolist() == expected
    else:
        assert inside.sum() == 1


def test_a_box_between_centres_has_the_patch_it_lies_on():
    # Patches of 8 px; the box lies in the corner of patch (row 1, column 3) of a 4 x 4 grid.
    inside = patches_in_box((29, 13, 2, 2), (4, 4), (32, 32))
    assert np.flatnonzero(inside).tolist() == [1 * 4 + 3]
