"""Tables of an ablation: mean and deviation over seeds, paired tests, the paper's figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from evaluation.ablations.config import AblationConfig, RowConfig, TableConfig
from evaluation.ablations.layouts import SCORERS, SPREAD, SWAPS, Layout, layout_of
from evaluation.ablations.plots import draw_curves, draw_means
from evaluation.ablations.runs import Results, write_csv
from evaluation.ablations.seed_tests import (
    Difference,
    detectable,
    difference,
    holm,
    mean_and_deviation,
)
from evaluation.latex import latex
from evaluation.results import Table
from vlp.io import write_json


def report(
    config: AblationConfig,
    results: Results,
    runs: Mapping[str, Sequence[Path]] = MappingProxyType({}),
) -> str:
    """Return gates and tables as text, and write them and their drawings into `output`.

    `report.md`, `report.tex` (booktabs) and `report.json` hold the tables, `figures.csv` every
    figure of every run, `figures.png` means with intervals, `curves.png` the trainings.

    Args:
        config: the ablation.
        results: of the finished runs.
        runs: their folders by variant, for the curves.
    """
    passed, compared = gates(config, results), compare_rows(config, results)
    drawn = [_table(each) for each in compared]
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    markdown = "\n\n".join([*passed, *(table.markdown() for table in drawn)])
    (folder / "report.md").write_text(markdown, encoding="utf-8")
    (folder / "report.tex").write_text(latex(drawn), encoding="utf-8")
    stored = [each.to_json() for each in compared]
    write_json(folder / "report.json", stored, indent=1, allow_nan=False)
    write_csv(folder / "figures.csv", results)
    if results:
        draw_means(folder / "figures.png", [(each.table, each.values) for each in compared])
        draw_curves(folder / "curves.png", runs)
    return "\n\n".join([*passed, *(table.text() for table in drawn)])


def smallest_difference(config: AblationConfig) -> str:
    """Say which difference this budget can find, before anything is run."""
    deviation = config.expected_deviation
    decimals = max((table.decimals for table in config.tables), default=1)
    counts = Counter(Counter(name for name, _ in config.runs()).values())
    variants = ", ".join(
        f"{number} variants with {seeds} seeds" for seeds, number in counts.items()
    )
    least = " or ".join(f"{detectable(deviation, seeds):.{decimals}f}" for seeds in counts)
    return (
        f"{variants} each. If differences vary by {deviation:g} points from seed to seed, {least} "
        "points are the smallest that a paired t-test (5 %, two-sided) finds in 80 of 100 such "
        "comparisons."
    )


def gates(config: AblationConfig, results: Results) -> list[str]:
    """Say in a line for each gate whether the split separates its variants."""
    lines = []
    for gate in config.gates:
        found = swaps_difference(results, gate.variant, gate.reference, config.scorer)
        passed = found.mean > 0 and found.p < gate.p
        verdict = "separates" if passed else "does NOT separate"
        lines.append(f"The split {verdict} {gate.variant} from {gate.reference}: {found} points.")
    return lines


def _compare(
    results: Results, variant: str, reference: str, own: Sequence[str], figures: Sequence[str]
) -> Difference:
    """Compare the mean of some figures over the seeds that both have.

    Args:
        results: of all runs.
        variant: what is compared.
        reference: what it is compared with.
        own: names of the variant's figures.
        figures: names of the reference's, in the same order.
    """
    values, others = _values(results, variant, own), _values(results, reference, figures)
    both = sorted(values.keys() & others.keys())
    return difference([values[seed] for seed in both], [others[seed] for seed in both])


def swaps_difference(results: Results, variant: str, reference: str, scorer: str) -> Difference:
    """Compare two variants by the figure that gates look at."""
    figure = SWAPS.format(view="image", scorer=scorer)
    return _compare(results, variant, reference, [figure], [figure])


def _values(results: Results, variant: str, figures: Sequence[str]) -> dict[int, float]:
    """Return the mean of some figures by seed, where a run has them all.

    Some evaluations leave figures out, such as METEOR without Java.
    """
    return {
        seed: float(np.mean([result["figures"][each] for each in figures]))
        for (name, seed), result in sorted(results.items())
        if name == variant and all(each in result["figures"] for each in figures)
    }


def tables(config: AblationConfig, results: Results) -> list[Table]:
    """Lay out every table as the paper does."""
    return [_table(compared) for compared in compare_rows(config, results)]


class Compared(NamedTuple):
    """Rows of a table with their figures, not laid out yet.

    columns: figures by heading, `{view}` open. differences: of each row, by heading; None where a
    row has none. values: of each row, those of the seeds that have the figure, by heading; None
    where a figure is not one of the row's view. cost: of each row, steps and seconds of training,
    means over its runs, where they were stored.
    """

    table: TableConfig
    layout: Layout
    scorer: str
    columns: Mapping[str, str]
    differences: list[dict[str, Difference | None]]
    values: list[dict[str, dict[int, float] | None]]
    seeds: list[list[int]]
    cost: list[tuple[float, float] | None]

    def to_json(self) -> dict[str, Any]:
        """Return the figures of every seed, the tests, and the cost, as plain JSON values."""
        rows = [
            {
                "label": row.label,
                "variant": row.variant,
                "view": row.view,
                "seeds": seeds,
                "figures": {head: own for head, own in values.items() if own is not None},
                "differences": {
                    what or next(iter(self.columns)): found.to_json()
                    for what, found in differences.items()
                    if found is not None
                },
                "training": cost and {"steps": cost[0], "seconds": cost[1]},
            }
            for row, seeds, values, differences, cost in zip(
                self.table.rows, self.seeds, self.values, self.differences, self.cost
            )
        ]
        return {"title": self.table.title, "reference": self.table.reference, "rows": rows}


def compare_rows(config: AblationConfig, results: Results) -> list[Compared]:
    """Collect every table's figures; all tests of a table are one family of Holm's correction."""
    return [_compared(table, results, config.scorer) for table in config.tables]


def _compared(table: TableConfig, results: Results, scorer: str) -> Compared:
    layout = layout_of(table)
    columns = layout.heads(results, scorer)
    tested = {
        what: [name.replace("{scorer}", scorer) for name in figures]
        for what, figures in layout.tested.items()
    }
    differences = _with_holm(
        [
            {what: _difference(results, row, table, figures) for what, figures in tested.items()}
            for row in table.rows
        ]
    )
    values = [
        {
            head: None
            if row.view != "image" and "{view}" not in name
            else _values(results, row.variant, [name.format(view=row.view)])
            for head, name in columns.items()
        }
        for row in table.rows
    ]
    seeds = [sorted(seed for name, seed in results if name == row.variant) for row in table.rows]
    cost = [_cost(results, row.variant) for row in table.rows]
    return Compared(table, layout, scorer, columns, differences, values, seeds, cost)


def _with_holm(rows: list[dict[str, Difference | None]]) -> list[dict[str, Difference | None]]:
    """Adjust the p of all differences together."""
    tested = [
        (number, what)
        for number, row in enumerate(rows)
        for what, found in row.items()
        if found is not None and found.seeds > 1
    ]
    raw = [found.p for number, what in tested if (found := rows[number][what]) is not None]
    adjusted = dict(zip(tested, holm(raw)))
    return [
        {
            what: found and found._replace(adjusted=adjusted.get((number, what)))
            for what, found in row.items()
        }
        for number, row in enumerate(rows)
    ]


def _cost(results: Results, variant: str) -> tuple[float, float] | None:
    """Return mean steps and seconds of training of a variant's runs."""
    known = [
        r["training"] for (name, _), r in results.items() if name == variant and "training" in r
    ]
    if not known:
        return None
    steps, seconds = (float(np.mean([one[key] for one in known])) for key in ("steps", "seconds"))
    return steps, seconds


def _table(compared: Compared) -> Table:
    table, layout = compared.table, compared.layout
    costly = any(compared.cost)
    tested = list(layout.tested)
    head = ["", *compared.columns, *(f"{what} − {table.reference}".strip() for what in tested)]
    head += ["seeds", *(["steps", "minutes"] if costly else [])]
    head += [f"paper: {p}" for p in table.paper]
    rows = [_row(compared, number, costly) for number in range(len(table.rows))]
    differences = [
        found
        for row, own in zip(table.rows, compared.differences)
        if row.view == "image" and (found := own[tested[0]]) is not None and found.seeds > 1
    ]
    notes = [layout.note.format(scorer=SCORERS[compared.scorer])]
    tests = sum(f is not None and f.seeds > 1 for own in compared.differences for f in own.values())
    if tests:
        notes.append(
            f"Holm: p corrected for all {tests} tests of this table; d: Cohen's d_z, the mean "
            "difference in its standard deviations, with its 95 % interval."
        )
    if costly:
        notes.append("Steps and minutes: of training alone, mean over seeds.")
    if differences:
        seeds = min(found.seeds for found in differences)
        typical = float(np.sqrt(np.mean([found.deviation**2 for found in differences])))
        least = detectable(typical, seeds)
        notes.append(
            layout.detectable.format(
                first=tested[0],
                typical=f"{typical:.{table.decimals}f}",
                least=f"{least:.{table.decimals}f}",
                seeds=seeds,
            )
        )
    return Table(table.title, head, rows, notes)


def _difference(
    results: Results, row: RowConfig, table: TableConfig, figures: Sequence[str]
) -> Difference | None:
    """Compare a row with the reference's images, if it is another row that has the figures."""
    imaged, seen = row.view == "image", all("{view}" in name for name in figures)
    if (imaged and row.variant == table.reference) or not (imaged or seen):
        return None
    own, plain = ([name.format(view=v) for name in figures] for v in (row.view, "image"))
    return _compare(results, row.variant, table.reference, own, plain)


def _row(compared: Compared, number: int, costly: bool) -> list[str]:
    row, decimals = compared.table.rows[number], compared.table.decimals
    cells = [row.label]
    for head, values in compared.values[number].items():
        digits = 2 if compared.columns[head] == SPREAD else decimals
        own = None if values is None else np.array(list(values.values()))
        cells.append("" if own is None else mean_and_deviation(own, digits))
    for found in compared.differences[number].values():
        cells.append("" if found is None else found.text(decimals))
    cells.append(str(len(compared.seeds[number])))
    if costly:
        cost = compared.cost[number]
        cells += ["–", "–"] if cost is None else [f"{cost[0]:.0f}", f"{cost[1] / 60:.1f}"]
    paper = [f"{figure:g}" for figure in row.paper] or [""] * len(compared.table.paper)
    return [*cells, *paper]
