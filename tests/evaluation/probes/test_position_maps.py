"""Maps of encodings: what they show, not how it looks."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from evaluation.probes.position_maps import disc, draw_position_maps, position_map

GRID, QUERY = (9, 11), (4, 5)


def test_md_sine_knows_only_the_sum_of_both_coordinates():
    values = position_map("md-sine", GRID, QUERY).values
    diagonals = [np.diagonal(values[:, ::-1], offset) for offset in range(-5, 6)]
    assert all(np.ptp(line) < 1e-9 for line in diagonals)


def test_shared_rows_of_a_table_are_equal_in_the_map():
    values = position_map("irpe-euclidean", GRID, QUERY, ratio=20).values
    row, column = QUERY
    assert values[row - 2, column] == values[row + 2, column] == values[row, column - 2]
    assert values[row - 2, column] != values[row, column - 1]


@pytest.mark.parametrize("name", ["rope-axial", "sine-2d", "alibi-2d"])
def test_nearer_is_more_alike_along_a_row(name):
    values = position_map(name, GRID, QUERY).values
    row, column = QUERY
    assert values.max() == values[QUERY]
    assert values[row, column] > values[row, column + 1] > values[row, column + 2]


def test_sape_sees_where_a_region_ends():
    values = position_map("sape", (14, 14), (4, 5)).values
    inside = disc((14, 14)).numpy()
    assert values[4, 5] == 0
    assert (values <= 0).all()
    assert values[inside].mean() > values[~inside].mean()


def test_what_has_no_map_is_refused(tmp_path):
    with pytest.raises(ValueError, match="anchor lies between an image and a text"):
        position_map("anchor")
    out = draw_position_maps(tmp_path / "maps.png")
    with Image.open(out) as image:
        assert image.width > 1000
