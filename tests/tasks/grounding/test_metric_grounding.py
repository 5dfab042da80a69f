"""Overlap of boxes, and the score of a box under a map, against counting pixels."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlp.tasks.grounding.metrics import box_scores, intersection_over_union

SIZE = 24, 16
whole = st.integers(0, 24)


@st.composite
def boxes(draw):
    x, y = draw(st.integers(0, SIZE[0] - 1)), draw(st.integers(0, SIZE[1] - 1))
    return [x, y, draw(st.integers(1, SIZE[0] - x)), draw(st.integers(1, SIZE[1] - y))]


def mask(box):
    x, y, width, height = box
    covered = np.zeros(SIZE[::-1], dtype=bool)
    covered[y : y + height, x : x + width] = True
    return covered


@given(st.lists(boxes(), min_size=1, max_size=4), boxes())
def test_overlap_is_that_of_the_pixels(many, other):
    found = intersection_over_union(np.array(many, dtype=float), other)
    expected = [(mask(b) & mask(other)).sum() / (mask(b) | mask(other)).sum() for b in many]
    np.testing.assert_allclose(found, expected)


@given(st.lists(boxes(), min_size=1, max_size=4), st.integers(0, 10))
def test_a_boxs_score_is_the_sum_of_its_pixels_over_the_root_of_its_area(many, seed):
    heat = np.random.default_rng(seed).random((4, 6))
    pixels = np.kron(heat, np.ones((4, 4)))
    expected = [pixels[mask(box)].sum() / np.sqrt(box[2] * box[3]) for box in many]
    np.testing.assert_allclose(box_scores(heat, np.array(many, dtype=float), SIZE), expected)


def test_what_lies_outside_or_has_no_area_counts_nothing():
    heat = np.ones((2, 2))
    found = box_scores(heat, np.array([[-4.0, 0, 8, 4], [3, 3, 0, 5], [100, 100, 5, 5]]), (8, 8))
    np.testing.assert_allclose(found, [16 / np.sqrt(32), 0, 0])
    nothing = intersection_over_union(np.array([[1.0, 1, 0, 0]]), [1, 1, 0, 0])
    assert nothing.tolist() == [0]


def test_patches_of_a_image_that_is_not_square():
    heat = np.array([[0.0, 1.0]])
    score = box_scores(heat, np.array([[5.0, 0, 5, 4]]), (20, 4))
    assert score[0] == pytest.approx(0)
    assert box_scores(heat, np.array([[8.0, 1, 4, 2]]), (20, 4))[0] == pytest.approx(4 / np.sqrt(8))
