"""Drawings of an ablation: means and differences with intervals, and curves of the trainings."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from evaluation.ablations.config import TableConfig
from vlp.training.run_folder import read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def draw_differences(tests: Sequence[Mapping[str, Any]]) -> str:
    """Draw paired differences from each table's reference: a panel for each table and figure.

    Lines are 95 % intervals. A filled dot has a p value below 0.05 after Holm's correction.
    Intervals of two seeds, which are several times as wide as those of three, are cut off.

    Args:
        tests: as `evaluation.ablations.stored_tables.paired_tests` returns them.

    Returns:
        An SVG, which is the same for the same tests.
    """
    import matplotlib
    from matplotlib.figure import Figure

    tables: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for test in tests:
        tables.setdefault(test["table"], {}).setdefault(test["figure"], []).append(test)
    names = [
        list(dict.fromkeys(test["row"] for rows in figures.values() for test in rows))
        for figures in tables.values()
    ]
    heights = [0.3 * len(each) + 1.2 for each in names]
    width = 2 + 3 * max(map(len, tables.values()), default=1)
    drawing = Figure(figsize=(width, sum(heights)), layout="constrained")
    lines = drawing.subfigures(len(tables), squeeze=False, height_ratios=heights)[:, 0]
    for line, labels, (title, figures) in zip(lines, names, tables.items(), strict=True):
        line.suptitle(title, fontsize="medium", wrap=True)
        panels = line.subplots(1, len(figures), squeeze=False, sharey=True)[0]
        for axes, (figure, rows) in zip(panels, figures.items(), strict=True):
            _draw_tests(axes, figure, rows, labels)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "differences", "svg.fonttype": "none"}):
        drawing.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _draw_tests(
    axes: Axes, figure: str, rows: Sequence[Mapping[str, Any]], labels: Sequence[str]
) -> None:
    for row in rows:
        height = labels.index(row["row"])
        axes.plot(row["interval"], [height, height], color="black", lw=1)
        face = "tab:blue" if row["adjusted"] < 0.05 else "white"
        axes.plot(row["mean"], height, "o", mfc=face, mec="tab:blue")
    ends = [end for row in rows if row["seeds"] > 2 for end in row["interval"]]
    ends += [0, *(row["mean"] for row in rows)]
    edge = 0.05 * (max(ends) - min(ends)) or 1
    axes.set_xlim(min(ends) - edge, max(ends) + edge)
    axes.axvline(0, color="grey", lw=0.8)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel(f"{figure} less that of {rows[0]['reference']}")
    axes.grid(axis="x", alpha=0.3)


def draw_curves(file: Path, runs: Mapping[str, Sequence[Path]]) -> bool:
    """Draw what was logged while training: the mean over a variant's runs, between its extremes.

    Args:
        file: a PNG.
        runs: folders of the finished runs of each variant.

    Returns:
        Whether there was anything to draw.
    """
    from matplotlib.figure import Figure

    logs = {
        name: [read_log(folder / "log.jsonl")[0] for folder in folders]
        for name, folders in runs.items()
    }
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
