"""Curves of a training as small SVG images, from the lines of log.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup, escape

WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 52, 18, 10, 34
COLOURS = 8
"""The style sheet has so many classes `c0`, `c1`, ...; further lines are dashed otherwise."""
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
    steps = [step for points in chart.lines.values() for step, _ in points]
    values = [v for points in chart.lines.values() for _, v in points if v is not None]
    x_ticks = ticks(min(steps, default=0), max(steps, default=1), 4)
    y_ticks = ticks(min(values, default=0), max(values, default=1), 4)
    x_low, x_high = min([*steps, x_ticks[0]]), max([*steps, x_ticks[-1]])
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def x(step: float) -> float:
        return LEFT + (step - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    label = f"{chart.title} against steps: " + ", ".join(
        f"{name} ends at {last}" for name, last in chart.last.items()
    )
    drawn = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}" '
        'xmlns="http://www.w3.org/2000/svg">'
    ]
    for tick in y_ticks:
        drawn.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}"/>')
        drawn.append(f'<text x="{LEFT - 5}" y="{y(tick) + 3.5:.1f}" class="up">{tick:g}</text>')
    for tick in x_ticks:
        drawn.append(
            f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 14}" class="along">{tick:g}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    drawn.append(f'<text x="{middle}" y="{HEIGHT - 4}" class="along">step</text>')
    for number, points in enumerate(chart.lines.values()):
        for part in _unbroken(_thinned(points)):
            places = [f"{x(step):.1f} {y(value):.1f}" for step, value in part]
            if len(places) == 1:
                across, up = places[0].split()
                drawn.append(
                    f'<circle class="dot {style(number)}" cx="{across}" cy="{up}" r="2.5"/>'
                )
            else:
                drawn.append(f'<path class="line {style(number)}" d="M{"L".join(places)}"/>')
    return Markup("".join([*drawn, "</svg>"]))


def style(number: int) -> str:
    """Classes of line number `number`."""
    return f"c{number % COLOURS} d{number // COLOURS % 3}"


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers, evenly apart, the first at or below `low` and the last at or above `high`."""
    if high <= low:
        middle = abs(low) or 1.0
        low, high = low - middle / 2, high + middle / 2
    raw = (high - low) / about
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * part for part in (1, 2, 2.5, 5, 10) if size * part >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{number * step:.10g}") for number in range(first, last + 1)]


def _thinned(points: Points) -> Points:
    every = math.ceil(len(points) / POINTS)
    return points[::every] + (points[-1:] if (len(points) - 1) % max(every, 1) else [])


def _unbroken(points: Points) -> list[list[tuple[float, float]]]:
    parts: list[list[tuple[float, float]]] = [[]]
    for step, value in points:
        if value is None:
            parts.append([])
        else:
            parts[-1].append((step, value))
    return [part for part in parts if part]
