from __future__ import annotations

import re
from typing import Any

from evaluation.ablations.plots import draw_differences


def difference(table: str, row: str, figure: str, mean: float, **facts: Any) -> dict[str, Any]:
    made = {"table": table, "row": row, "figure": figure, "mean": mean, "reference": "none"}
    return made | {"interval": [mean - 1, mean + 1], "adjusted": 0.5, "seeds": 3} | facts


def test_a_panel_has_its_rows_at_the_heights_of_its_table() -> None:
    """A row without one of the figures leaves its line empty there."""
    tests = [
        difference("first", "bias", "loss", -2.0, adjusted=0.01),
        difference("first", "ace", "loss", -4.0),
        difference("first", "ace", "recall", 3.0),
        difference("second", "ace", "seconds", 0.0),
    ]
    drawn = draw_differences(tests)
    assert drawn == draw_differences(tests)
    assert [len(re.findall(rf">{name}<", drawn)) for name in ("bias", "ace")] == [1, 2]
    for text in ("first", "second", "loss less that of none", "recall less that of none"):
        assert f">{text}<" in drawn
    dots = [
        (fill, float(height))
        for group in re.findall(r'<g id="line2d_\d+">(.*?)</g>\s*</g>', drawn, re.S)
        for height, fill in re.findall(r'<use [^>]*y="([\d.]+)" style="fill: (#\w+); stroke', group)
    ]
    filled = [height for fill, height in dots if fill == "#1f77b4"]
    empty = [height for fill, height in dots if fill == "#ffffff"]
    assert len(filled) == 1
    assert len(empty) == 3
    assert empty[0] == empty[1] > filled[0]  # `ace` lies below `bias` in both panels


def test_two_seeds_do_not_stretch_a_panel() -> None:
    """Their interval is cut off: the others stay where they were."""
    wide = [-400.0, 400.0]
    rows = [difference("t", "a", "loss", 1.0), difference("t", "b", "loss", 2.0)]
    narrow = draw_differences(rows)
    cut = draw_differences([rows[0], rows[1] | {"interval": wide, "seeds": 2}])
    ticks = [re.findall(r">([−\d.]+)</text>", drawn) for drawn in (narrow, cut)]
    assert ticks[0]
    assert max(abs(float(t.replace("−", "-"))) for t in ticks[1]) < 10
