"""An ablation's tables: mean and deviation over seeds, paired tests, and the paper beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evaluation.ablations.ablation import AblationConfig, RowConfig, TableConfig
from evaluation.ablations.runs import Results, write_csv
from evaluation.ablations.seed_tests import Difference, detectable, difference, mean_and_deviation
from evaluation.core.results import Table

JUDGED = "swaps/{view}/{scorer}/all/pair"
"""The figure that gates and tests look at: right comparisons of the cross-modal encoder."""

SPREAD = "paths/spread"
"""The one figure that is no percentage: patches and tokens."""

RECALL = ("rerank/text_to_image/R@1", "rerank/image_to_text/R@1")
"""What the paper compares; differences are those of the mean of both."""

COLUMNS = {
    "place": "swaps/{view}/{scorer}/place/pair",
    "relation": "swaps/{view}/{scorer}/relation/pair",
    "order": "swaps/{view}/{scorer}/order/pair",
    "binding": "swaps/{view}/{scorer}/binding/pair",
    "distance": "swaps/{view}/{scorer}/distance/pair",
    "all swaps": JUDGED,
    "group": "swaps/{view}/{scorer}/all/group",
    "ITM": "swaps/{view}/match/all/pair",
    "R@1 t→i": RECALL[0],
    "R@1 i→t": RECALL[1],
}
_JUDGES = {
    "match": "image-text matching",
    "words": "the likelihood of the masked words (ITM: by image-text matching)",
}
_SEEDS = "Ours: percent, mean ± standard deviation over seeds; "


class Layout(NamedTuple):
    """What a table shows.

    columns: figures by their headings. tested: headings of the differences, each of the mean of
    some figures; the first is what the smallest difference is told of. note: what it all means.
    """

    columns: dict[str, str]
    tested: dict[str, tuple[str, ...]]
    note: str


LAYOUTS = {
    "swaps": Layout(
        COLUMNS,
        {"all swaps": (JUDGED,), "R@1": RECALL},
        _SEEDS + "swaps: right comparisons, chance 50 (group: 16.7), by {judge}; R@1 re-ranked, "
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


def report(config: AblationConfig, results: Results) -> str:
    """Gates and tables; written to `output` as `report.md`, and every figure as `figures.csv`."""
    drawn = [*gates(config, results), *(table.text() for table in tables(config, results))]
    markdown = [*gates(config, results), *(table.markdown() for table in tables(config, results))]
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text("\n\n".join(markdown) + "\n", encoding="utf-8")
    write_csv(folder / "figures.csv", results)
    return "\n\n".join(drawn)


def smallest_difference(config: AblationConfig) -> str:
    """What this budget can find, said before anything is run."""
    seeds, deviation = len(config.seeds), config.expected_deviation
    least = detectable(deviation, seeds)
    return (
        f"{len(config.variants)} variants with {seeds} seeds each. If differences vary by "
        f"{deviation:g} points from seed to seed, a difference of {least:.1f} points is the "
        "smallest that a paired t-test (5 %, two-sided) finds in 80 of 100 such ablations."
    )


def gates(config: AblationConfig, results: Results) -> list[str]:
    """Whether the split is a test at all: one line for each gate."""
    lines = []
    for gate in config.gates:
        found = judged(results, gate.variant, gate.reference, config.scorer)
        passed = found.mean > 0 and found.p < gate.p
        verdict = "separates" if passed else "does NOT separate"
        lines.append(f"The split {verdict} {gate.variant} from {gate.reference}: {found} points.")
    return lines


def _compare(
    results: Results, variant: str, reference: str, own: Sequence[str], figures: Sequence[str]
) -> Difference:
    """Difference of the mean of some figures over the seeds that both have.

    Args:
        results: of all runs.
        variant: what is compared.
        reference: what it is compared with.
        own: names of the variant's figures.
        figures: names of the reference's, in the same order.
    """
    seeds = sorted({seed for name, seed in results if name == variant})
    both = [seed for seed in seeds if (reference, seed) in results]
    return difference(
        [_mean(results[variant, seed], own) for seed in both],
        [_mean(results[reference, seed], figures) for seed in both],
    )


def judged(results: Results, variant: str, reference: str, scorer: str) -> Difference:
    """Difference of the figure that gates look at."""
    figure = JUDGED.format(view="image", scorer=scorer)
    return _compare(results, variant, reference, [figure], [figure])


def _mean(result: Mapping[str, Any], figures: Sequence[str]) -> float:
    return float(np.mean([result["figures"][name] for name in figures]))


def tables(config: AblationConfig, results: Results) -> list[Table]:
    """Every table that has results, in the paper's layout."""
    return [_table(table, results, config.scorer) for table in config.tables]


def _table(table: TableConfig, results: Results, scorer: str) -> Table:
    layout = LAYOUTS[table.about]
    columns = _columns(layout, results, scorer)
    tested = {
        what: [name.replace("{scorer}", scorer) for name in figures]
        for what, figures in layout.tested.items()
    }
    head = ["", *columns, *(f"{what} − {table.reference}" for what in tested), "seeds"]
    head += [f"paper: {p}" for p in table.paper]
    rows = [_row(row, table, columns, tested, results) for row in table.rows]
    first, figures = next(iter(tested.items()))
    differences = [
        _tested(results, row, table.reference, figures)
        for row in table.rows
        if row.view == "image" and row.variant != table.reference
    ]
    deviations = [found.deviation for found in differences if found.seeds > 1]
    notes = [layout.note.format(judge=_JUDGES[scorer])]
    if deviations:
        seeds = min(found.seeds for found in differences if found.seeds > 1)
        typical = float(np.sqrt(np.mean(np.square(deviations))))
        notes.append(
            f"Differences of {first} varied by {typical:.1f} points between seeds: "
            f"{detectable(typical, seeds):.1f} points are what {seeds} seeds can detect."
        )
    return Table(table.title, head, rows, notes)


def _columns(layout: Layout, results: Results, scorer: str) -> dict[str, str]:
    """Those that any result has: a corpus of single objects has swaps of places alone."""
    known = {name for result in results.values() for name in result["figures"]}
    wanted = {head: name.replace("{scorer}", scorer) for head, name in layout.columns.items()}
    if scorer == "match":
        wanted.pop("ITM", None)  # the other columns are its own
    return {head: name for head, name in wanted.items() if name.format(view="image") in known}


def _tested(results: Results, row: RowConfig, reference: str, figures: Sequence[str]) -> Difference:
    """A row against the reference's images."""
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
        found = [results[row.variant, seed]["figures"] for seed in seeds]
        figure = name.format(view=row.view)
        values = np.array([each[figure] for each in found if figure in each])
        cells.append(mean_and_deviation(values, decimals=2 if figure == SPREAD else 1))
    for figures in tested.values():
        seen = all("{view}" in name for name in figures)
        empty = (imaged and row.variant == table.reference) or not (imaged or seen)
        cells.append("" if empty else str(_tested(results, row, table.reference, figures)))
    cells.append(str(len(seeds)))
    return [*cells, *([f"{figure:g}" for figure in row.paper] or [""] * len(table.paper))]
