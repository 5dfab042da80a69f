"""Tables of an ablation: mean and deviation over seeds, paired tests, the paper's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evaluation.ablations.config import AblationConfig, RowConfig, TableConfig
from evaluation.ablations.runs import Results, write_csv
from evaluation.ablations.seed_tests import Difference, detectable, difference, mean_and_deviation
from evaluation.core.results import Table

SWAPS = "swaps/{view}/{scorer}/all/pair"
"""The figure that gates and tests look at: right comparisons of the cross-modal encoder."""

SPREAD = "paths/spread"
"""The one figure that is no percentage: patches and tokens."""

RECALL = ("rerank/text_to_image/R@1", "rerank/image_to_text/R@1")
"""Figures that the paper compares; differences are those of the mean of both."""

COLUMNS = {
    "place": "swaps/{view}/{scorer}/place/pair",
    "relation": "swaps/{view}/{scorer}/relation/pair",
    "order": "swaps/{view}/{scorer}/order/pair",
    "binding": "swaps/{view}/{scorer}/binding/pair",
    "distance": "swaps/{view}/{scorer}/distance/pair",
    "all swaps": SWAPS,
    "group": "swaps/{view}/{scorer}/all/group",
    "ITM": "swaps/{view}/match/all/pair",
    "R@1 t→i": RECALL[0],
    "R@1 i→t": RECALL[1],
}
_SCORERS = {
    "match": "image-text matching",
    "words": "the likelihood of the masked words (ITM: by image-text matching)",
}
_SEEDS = "Ours: percent, mean ± standard deviation over seeds; "


class Layout(NamedTuple):
    """Columns, tests and notes of a table.

    columns: figures by their headings. tested: headings of the differences, each of the mean of
    some figures; `detectable` speaks of the first. note: explains the columns. detectable: the
    smallest difference that was found to be detectable. all_columns: also those without a figure.
    """

    columns: Mapping[str, str]
    tested: Mapping[str, tuple[str, ...]]
    note: str
    detectable: str = (
        "Differences of {first} varied by {typical} points between seeds: {least} points are what "
        "{seeds} seeds can detect."
    )
    all_columns: bool = False


LAYOUTS = {
    "swaps": Layout(
        COLUMNS,
        {"all swaps": (SWAPS,), "R@1": RECALL},
        _SEEDS + "swaps: right comparisons, chance 50 (group: 16.7), by {scorer}; R@1 re-ranked, "
        "held-out scenes, its differences those of the mean of both directions; p by a paired "
        "t-test.",
    ),
    "anchors": Layout(
        {
            "R@1 t→i": "dual/text_to_image/R@1",
            "R@1 i→t": "dual/image_to_text/R@1",
            "colour words": "pointing/colour",
            "shape words": "pointing/shape",
            "anchors in box: colour": "anchors/colour",
            "shape": "anchors/shape",
            "anchors": "paths/anchors",
            "reachable": "paths/reachable",
            "spread": SPREAD,
        },
        {
            "colour words": ("pointing/colour",),
            "R@1": ("dual/text_to_image/R@1", "dual/image_to_text/R@1"),
        },
        _SEEDS + "words: whose most similar patch lies in their object's box; anchors in box: of "
        "a word's anchors; anchors and reachable: of all patches and words; spread: standard "
        "deviation of a word's paths, in patches and tokens; R@1: of the dual encoder, held-out "
        "scenes, its differences those of the mean of both directions; p by a paired t-test.",
    ),
}


def _layout(table: TableConfig) -> Layout:
    if not table.figures:
        return LAYOUTS[table.about]
    first = next(iter(table.figures.values()))
    return Layout(
        table.figures,
        {"": (first,)},
        "Ours: mean ± standard deviation over seeds; the difference is that of the first column, "
        "paired by seed, with a two-sided t-test.",
        "Differences varied by {typical} between seeds: {least} is what {seeds} seeds can detect.",
        all_columns=True,
    )


def report(config: AblationConfig, results: Results) -> str:
    """Return gates and tables as text; write `report.md` and `figures.csv` into `output`.

    Of vision models the first column of the first table is also drawn, as `figures.png`.
    """
    passed, drawn = gates(config, results), tables(config, results)
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    markdown = "\n\n".join([*passed, *(table.markdown() for table in drawn)])
    (folder / "report.md").write_text(markdown, encoding="utf-8")
    write_csv(folder / "figures.csv", results)
    if results and config.corpus is None:
        _plot(folder / "figures.png", config.tables[0], results)
    return "\n\n".join([*passed, *(table.text() for table in drawn)])


def smallest_difference(config: AblationConfig) -> str:
    """Say which difference this budget can find, before anything is run."""
    seeds, deviation = len(config.seeds), config.expected_deviation
    decimals = max((table.decimals for table in config.tables), default=1)
    return (
        f"{len(config.variants)} variants with {seeds} seeds each. If differences vary by "
        f"{deviation:g} points from seed to seed, {detectable(deviation, seeds):.{decimals}f} "
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
    return [_table(table, results, config.scorer) for table in config.tables]


def _table(table: TableConfig, results: Results, scorer: str) -> Table:
    layout = _layout(table)
    columns = _columns(layout, results, scorer)
    tested = {
        what: [name.replace("{scorer}", scorer) for name in figures]
        for what, figures in layout.tested.items()
    }
    head = ["", *columns, *(f"{what} − {table.reference}".strip() for what in tested), "seeds"]
    head += [f"paper: {p}" for p in table.paper]
    rows = [_row(row, table, columns, tested, results) for row in table.rows]
    first, figures = next(iter(tested.items()))
    differences = [
        _tested(results, row, table.reference, figures)
        for row in table.rows
        if row.view == "image" and row.variant != table.reference
    ]
    deviations = [found.deviation for found in differences if found.seeds > 1]
    notes = [layout.note.format(scorer=_SCORERS[scorer])]
    if deviations:
        seeds = min(found.seeds for found in differences if found.seeds > 1)
        typical = float(np.sqrt(np.mean(np.square(deviations))))
        least = detectable(typical, seeds)
        notes.append(
            layout.detectable.format(
                first=first,
                typical=f"{typical:.{table.decimals}f}",
                least=f"{least:.{table.decimals}f}",
                seeds=seeds,
            )
        )
    return Table(table.title, head, rows, notes)


def _columns(layout: Layout, results: Results, scorer: str) -> dict[str, str]:
    """Return the columns that any result has: a corpus of single objects swaps places alone."""
    if layout.all_columns:
        return dict(layout.columns)
    known = {name for result in results.values() for name in result["figures"]}
    wanted = {head: name.replace("{scorer}", scorer) for head, name in layout.columns.items()}
    if scorer == "match":
        wanted.pop("ITM", None)  # the other columns are its own
    return {head: name for head, name in wanted.items() if name.format(view="image") in known}


def _tested(results: Results, row: RowConfig, reference: str, figures: Sequence[str]) -> Difference:
    """Compare a row with the reference's images."""
    own, plain = ([name.format(view=v) for name in figures] for v in (row.view, "image"))
    return _compare(results, row.variant, reference, own, plain)


def _row(
    row: RowConfig,
    table: TableConfig,
    columns: Mapping[str, str],
    tested: Mapping[str, Sequence[str]],
    results: Results,
) -> list[str]:
    seeds = sorted(seed for name, seed in results if name == row.variant)
    imaged = row.view == "image"
    cells = [row.label]
    for name in columns.values():
        if not imaged and "{view}" not in name:
            cells.append("")
            continue
        figure = name.format(view=row.view)
        values = np.array(list(_values(results, row.variant, [figure]).values()))
        cells.append(mean_and_deviation(values, 2 if figure == SPREAD else table.decimals))
    for figures in tested.values():
        seen = all("{view}" in name for name in figures)
        empty = (imaged and row.variant == table.reference) or not (imaged or seen)
        found = _tested(results, row, table.reference, figures)
        cells.append("" if empty else found.text(table.decimals))
    cells.append(str(len(seeds)))
    return [*cells, *([f"{figure:g}" for figure in row.paper] or [""] * len(table.paper))]


def _plot(file: Path, table: TableConfig, results: Results) -> None:
    """Draw a dot for each seed and a bar at the mean, one line for each row of the table."""
    from matplotlib.figure import Figure

    title, figure = next(iter(table.figures.items()))
    drawing = Figure(figsize=(7, 0.4 * len(table.rows) + 1.2), layout="constrained")
    axes = drawing.add_subplot()
    for height, row in enumerate(table.rows):
        values = list(_values(results, row.variant, [figure]).values())
        axes.plot(values, [height] * len(values), "o", color="tab:blue", alpha=0.6)
        if values:
            axes.plot(np.mean(values), height, "|", color="black", markersize=16)
    axes.set_yticks(range(len(table.rows)), [row.label for row in table.rows])
    axes.invert_yaxis()
    axes.set_xlabel(title)
    drawing.suptitle(table.title, fontsize="medium", wrap=True)
    axes.grid(axis="x", alpha=0.3)
    drawing.savefig(file, dpi=120)
