import numpy as np
import pytest
import torch
from PIL import Image

from evaluation.probes.position_card import disc, position_map
from launch.cli.main import main
from vlp.positions import PositionEncoding, register_position, registry

GRID, QUERY = (9, 11), (4, 5)


@pytest.mark.parametrize("name", ["rope-axial", "sine-2d", "alibi-2d"])
def test_nearer_is_more_alike_along_a_row(name):
    _, values = position_map(name, GRID, QUERY)
    row, column = QUERY
    assert values.max() == values[QUERY]
    assert values[row, column] > values[row, column + 1] > values[row, column + 2]


def test_sape_sees_where_a_region_ends():
    _, values = position_map("sape", (14, 14), (4, 5))
    inside = disc((14, 14)).numpy()
    assert values[4, 5] == 0
    assert (values <= 0).all()
    assert values[inside].mean() > values[~inside].mean()


def test_a_start_other_than_zero_is_drawn_as_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(registry, "_ENCODINGS", dict(registry._ENCODINGS))

    @register_position("same-column")
    class SameColumn(PositionEncoding):
        def __init__(self, heads: int, start: float = 0.0) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.full((heads,), start))

        def bias(self, query, key, context):
            column = torch.arange(context.grid[0] * context.grid[1]) % context.grid[1]
            return self.table[:, None, None] * (column[:, None] == column[None])

    given = ["positions", "show", "same-column", "--grid", "7x7"]
    assert main([*given, "start=1.5", "--out", str(tmp_path / "map.png")]) == 0
    assert "start (float) = 1.5" in capsys.readouterr().out
    with Image.open(tmp_path / "map.png") as image:
        assert image.width > 300
    _, values = position_map("same-column", GRID, QUERY, start=1.5)
    assert (values[:, QUERY[1]] == 1.5).all()
    assert np.delete(values, QUERY[1], 1).max() == 0.0
    _, drawn = position_map("same-column", GRID, QUERY)
    assert drawn.any(), "a table of zeros is drawn from N(0, 1)"
