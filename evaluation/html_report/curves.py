"""Curves of a training, drawn by Vega-Lite as SVG images, from the lines of log.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import vl_convert
from markupsafe import Markup, escape

COLOURS = [f"var(--c{number})" for number in range(8)]
"""Defined by the style sheet, for a light and a dark page; further lines are dashed otherwise."""
DASHES = [[1, 0], [6, 3], [2, 3]]
POINTS = 400
"""A line is drawn with about so many points at most."""

Points = list[tuple[float, float | None]]
"""Steps and values; None where there is a gap."""


class Chart(NamedTuple):
    """A title, lines by label, and what the upward axis counts."""

    title: str
    lines: dict[str, Points]
    unit: str = ""

    @property
    def last(self) -> dict[str, str]:
        """Return the last value of each line, for its legend."""
        found = {}
        for label, points in self.lines.items():
            values = [value for _, value in points if value is not None]
            found[label] = f"{values[-1]:.4g}" if values else "none"
        return found


def training_charts(log: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Loss and its parts, validation figures, learning rate and speed, as far as logged."""
    charts = [
        Chart("Loss", _named(log, "loss/")),
        Chart("Validation", _named(log, "validation/")),
        Chart("Learning rate", _named(log, "learning_rate")),
        Chart("Speed", _named(log, "samples_per_second"), "samples/s"),
    ]
    return [chart for chart in charts if chart.lines]


def compared_charts(logs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Chart]:
    """Chart the total loss and the speed of several runs in one image each."""
    charts = []
    for title, name, unit in (
        ("Total loss", "loss/total", ""),
        ("Speed", "samples_per_second", "samples/s"),
    ):
        lines = {run: _line(log, name) for run, log in logs.items()}
        charts.append(Chart(title, {run: line for run, line in lines.items() if line}, unit))
    return [chart for chart in charts if len(chart.lines) > 1]


def _named(log: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, Points]:
    """Lines whose name starts so and does not go deeper; the total loss comes first."""
    names = {
        name
        for row in log
        for name in row
        if name.startswith(prefix) and "/" not in name.removeprefix(prefix)
    }
    ordered = sorted(names, key=lambda name: (name != "loss/total", name))
    lines = {
        (name.removeprefix(prefix) or prefix).replace("_", " "): _line(log, name)
        for name in ordered
    }
    if len(lines) == 2 and len({*map(tuple, lines.values())}) == 1:
        # A loss of one part is that part; two lines would hide each other.
        del lines[ordered[1].removeprefix(prefix).replace("_", " ")]
    return lines


def _line(log: Sequence[Mapping[str, Any]], name: str) -> Points:
    points: Points = []
    for row in log:
        if name in row:
            value = row[name]
            usable = isinstance(value, int | float) and math.isfinite(value)
            points.append((float(row["step"]), float(value) if usable else None))
    return points


def svg(chart: Chart) -> Markup:
    """Draw the image; its colours are those of the page's style sheet."""
    last = chart.last
    label = f"{chart.title} against steps: " + ", ".join(
        f"{name} ends at {value}" for name, value in last.items()
    )
    drawn = vl_convert.vegalite_to_svg(_specification(chart, last))
    said = f'<svg role="img" aria-label="{escape(label)}"'
    return Markup(drawn.replace("<svg", said, 1))


def _specification(chart: Chart, last: Mapping[str, str]) -> dict[str, Any]:
    """Describe the image in Vega-Lite."""
    legends = [f"{name}: {value}" for name, value in last.items()]
    values = [
        {"step": step, "value": value, "line": legend}
        for legend, points in zip(legends, chart.lines.values(), strict=True)
        for step, value in _thinned(points)
    ]
    number = {"type": "quantitative", "scale": {"zero": False}}
    line = {"field": "line", "type": "nominal", "sort": None}
    dashes = [DASHES[n // len(COLOURS) % len(DASHES)] for n in range(len(legends))]
    dashed = {**line, "scale": {"domain": legends, "range": dashes}}
    text = "var(--soft)"
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "data": {"values": values},
        "width": 300,
        "height": 150,
        # A point between gaps is a line without length, which round ends make a dot.
        "mark": {
            "type": "line",
            "strokeCap": "round",
            "invalid": "break-paths-show-domains",
            "aria": False,
        },
        "encoding": {
            "x": {"field": "step", **number, "axis": {"title": "step"}},
            "y": {"field": "value", **number, "axis": {"title": None, "format": ".4~g"}},
            "color": {**line, "scale": {"domain": legends, "range": COLOURS}},
            **({"strokeDash": dashed} if len(legends) > len(COLOURS) else {}),
        },
        "config": {
            "background": None,
            "view": {"stroke": None},
            "axis": {
                "tickCount": 4,
                "labelColor": text,
                "titleColor": text,
                "titleFontWeight": "normal",
                "gridColor": "var(--rule)",
                "domainColor": text,
                "tickColor": text,
            },
            "legend": {
                "orient": "bottom",
                "columns": 2 if all(len(legend) < 22 for legend in legends) else 1,
                "title": None,
                "labelLimit": 280,
                "labelColor": text,
                "labelFontSize": 11,
                "symbolSize": 250,
            },
        },
    }


def _thinned(points: Points) -> Points:
    every = math.ceil(len(points) / POINTS)
    return points[::every] + (points[-1:] if (len(points) - 1) % max(every, 1) else [])
