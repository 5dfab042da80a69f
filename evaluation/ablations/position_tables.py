"""Tables, CSV and plot of a comparison of position encodings, the paper's figures beside ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from evaluation.ablations.position_study import PositionsConfig, TableConfig
from evaluation.ablations.runs import Results, write_csv
from evaluation.ablations.seed_tests import detectable, difference, mean_and_deviation
from evaluation.core.results import Table


def smallest_difference(config: PositionsConfig) -> str:
    """What this budget can find, said before anything is run."""
    seeds, deviation = len(config.seeds), config.expected_deviation
    decimals = max((table.decimals for table in config.tables), default=1)
    return (
        f"{len(config.variants)} variants with {seeds} seeds each. If differences vary by "
        f"{deviation:g} points from seed to seed, {detectable(deviation, seeds):.{decimals}f} "
        "points are the smallest that a paired t-test (5 %, two-sided) finds in 80 of 100 such "
        "comparisons."
    )


def report(config: PositionsConfig, results: Results, folder: Path) -> str:
    """Every table as text; `report.md`, `figures.csv` and `figures.png` are written to `folder`."""
    drawn = [_table(table, results) for table in config.tables]
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(table.markdown() for table in drawn)
    (folder / "report.md").write_text(text, encoding="utf-8")
    write_csv(folder / "figures.csv", results)
    if results:
        _plot(folder / "figures.png", config.tables[0], results)
    return "\n\n".join(table.text() for table in drawn)


def _table(table: TableConfig, results: Results) -> Table:
    first = next(iter(table.figures.values()))
    head = ["", *table.figures, f"− {table.reference}", "seeds"]
    rows, deviations, decimals = [], [], table.decimals
    for row in table.rows:
        seeds = sorted(seed for name, seed in results if name == row.variant)
        values = [_values(results, row.variant, figure) for figure in table.figures.values()]
        cells = [mean_and_deviation(np.array(list(each.values())), decimals) for each in values]
        own_first, reference = values[0], _values(results, table.reference, first)
        both = sorted(own_first.keys() & reference.keys())
        found = difference([own_first[seed] for seed in both], [reference[seed] for seed in both])
        own = row.variant == table.reference
        if not own and found.seeds > 1:
            deviations.append((found.deviation, found.seeds))
        paper = [f"{figure:g}" for figure in row.paper] or [""] * len(table.paper)
        rows.append(
            [row.label, *cells, "" if own else found.text(decimals), str(len(seeds)), *paper]
        )
    notes = [
        "Ours: mean ± standard deviation over seeds; the difference is that of the first column, "
        "paired by seed, with a two-sided t-test."
    ]
    if deviations:
        typical = float(np.sqrt(np.mean([deviation**2 for deviation, _ in deviations])))
        fewest = min(count for _, count in deviations)
        notes.append(
            f"Differences varied by {typical:.{decimals}f} between seeds: "
            f"{detectable(typical, fewest):.{decimals}f} is what {fewest} seeds can detect."
        )
    return Table(table.title, [*head, *(f"paper: {name}" for name in table.paper)], rows, notes)


def _values(results: Results, variant: str, figure: str) -> dict[int, float]:
    """A figure by seed; some evaluations leave figures out, such as METEOR without Java."""
    return {
        seed: result["figures"][figure]
        for (name, seed), result in sorted(results.items())
        if name == variant and figure in result["figures"]
    }


def _plot(file: Path, table: TableConfig, results: Results) -> None:
    """A dot for each seed and a bar at the mean, one line for each row of the table."""
    from matplotlib.figure import Figure

    title, figure = next(iter(table.figures.items()))
    drawing = Figure(figsize=(7, 0.4 * len(table.rows) + 1.2), layout="constrained")
    axes = drawing.add_subplot()
    for place, row in enumerate(table.rows):
        values = list(_values(results, row.variant, figure).values())
        axes.plot(values, [place] * len(values), "o", color="tab:blue", alpha=0.6)
        if values:
            axes.plot(np.mean(values), place, "|", color="black", markersize=16)
    axes.set_yticks(range(len(table.rows)), [row.label for row in table.rows])
    axes.invert_yaxis()
    axes.set_xlabel(title)
    drawing.suptitle(table.title, fontsize="medium", wrap=True)
    axes.grid(axis="x", alpha=0.3)
    drawing.savefig(file, dpi=120)
