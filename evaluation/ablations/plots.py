"""Drawings of an ablation: means with intervals, and curves of the trainings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from evaluation.ablations.config import TableConfig
from evaluation.ablations.measures import training_log

Values = Sequence[Mapping[str, Mapping[int, float] | None]]
"""Figures of each row: by column, by seed; None where a column is not the row's."""

POINTS = 200
CURVES = ("validation/recall", "accuracy", "loss/total")
"""Logged figures that a curve is drawn of; the first that the runs have."""


def interval(values: Sequence[float]) -> float:
    """Half the 95 % interval of a mean by Student's t; 0 of a single value."""
    if len(values) < 2:
        return 0.0
    deviation = float(np.std(values, ddof=1))
    return float(stats.t.ppf(0.975, len(values) - 1)) * deviation / math.sqrt(len(values))


def draw_means(file: Path, tables: Sequence[tuple[TableConfig, Values]]) -> None:
    """Draw the first column of each table: a dot for each seed, the mean and its 95 % interval.

    Args:
        file: a PNG, or a PDF beside which there is none.
        tables: with the figures of their rows.
    """
    from matplotlib.figure import Figure

    heights = [0.4 * len(table.rows) + 1.2 for table, _ in tables]
    drawing = Figure(figsize=(7, sum(heights)), layout="constrained")
    panels = drawing.subplots(len(tables), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (table, rows) in zip(panels, tables):
        title = next((column for row in rows for column in row), "")
        for height, row in enumerate(rows):
            values = list((row.get(title) or {}).values())
            axes.plot(values, [height] * len(values), "o", color="tab:blue", alpha=0.4)
            if values:
                mean, half = float(np.mean(values)), interval(values)
                axes.errorbar(mean, height, xerr=half, fmt="|", color="black", capsize=4)
        axes.set_yticks(range(len(table.rows)), [row.label for row in table.rows])
        axes.invert_yaxis()
        axes.set_xlabel(f"{title} (mean, 95 % interval over seeds)")
        axes.set_title(table.title, fontsize="medium", wrap=True)
        axes.grid(axis="x", alpha=0.3)
    drawing.savefig(file, dpi=120)


def draw_curves(file: Path, runs: Mapping[str, Sequence[Path]]) -> bool:
    """Draw what was logged while training: the mean over a variant's runs, between its extremes.

    Args:
        file: a PNG.
        runs: folders of the finished runs of each variant.

    Returns:
        Whether there was anything to draw.
    """
    from matplotlib.figure import Figure

    logs = {name: [training_log(folder) for folder in folders] for name, folders in runs.items()}
    name = next(
        (
            key
            for wanted in CURVES
            for each in logs.values()
            for log in each
            for row in log
            for key in row
            if key.endswith(wanted) or key.startswith(wanted)
        ),
        None,
    )
    if name is None:
        return False
    drawing = Figure(figsize=(7, 4.5), layout="constrained")
    axes = drawing.add_subplot()
    for number, (variant, each) in enumerate(logs.items()):
        lines = [_line(log, name) for log in each]
        lines = [line for line in lines if len(line)]
        if not lines:
            continue
        last = min(line[-1, 0] for line in lines)
        steps = np.linspace(max(line[0, 0] for line in lines), last, POINTS)
        values = np.stack([np.interp(steps, line[:, 0], line[:, 1]) for line in lines])
        colour, style = f"C{number % 10}", ("-", "--", ":", "-.")[number // 10 % 4]
        axes.plot(steps, values.mean(0), style, color=colour, label=variant)
        axes.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.15, lw=0)
    axes.set_xlabel("step")
    axes.set_ylabel(name)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    drawing.savefig(file, dpi=120)
    return True


def _line(log: Sequence[Mapping[str, Any]], name: str) -> np.ndarray[Any, Any]:
    points = [(row["step"], row[name]) for row in log if isinstance(row.get(name), int | float)]
    return np.array([point for point in points if math.isfinite(point[1])], dtype=float)
