"""An ablation's tables: mean and deviation over seeds, paired tests, and the paper beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.ablation import AblationConfig, RowConfig, TableConfig
from evaluation.paired import Difference, detectable, difference, mean_and_deviation
from evaluation.report import Table
from evaluation.runs import Results, write_csv

JUDGED = "swaps/{view}/{scorer}/all/pair"
"""The figure that gates and tests look at: right comparisons of the cross-modal encoder."""

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


def judged(
    results: Results, variant: str, reference: str, scorer: str, view: str = "picture"
) -> Difference:
    """Difference of the judged figure; the view is the variant's."""
    own, figure = (JUDGED.format(view=seen, scorer=scorer) for seen in (view, "picture"))
    return _compare(results, variant, reference, [own], [figure])


def _mean(result: Mapping[str, Any], figures: Sequence[str]) -> float:
    return float(np.mean([result["figures"][name] for name in figures]))


def tables(config: AblationConfig, results: Results) -> list[Table]:
    """Every table that has results, in the paper's layout."""
    return [_table(table, results, config.scorer) for table in config.tables]


def _table(table: TableConfig, results: Results, scorer: str) -> Table:
    columns = _columns(results, scorer)
    tested = [f"{what} − {table.reference}" for what in ("all swaps", "R@1")]
    head = ["", *columns, *tested, "seeds", *(f"paper: {p}" for p in table.paper)]
    rows = [_row(row, table, columns, results, scorer) for row in table.rows]
    differences = [
        judged(results, row.variant, table.reference, scorer)
        for row in table.rows
        if row.view == "picture" and row.variant != table.reference
    ]
    deviations = [found.deviation for found in differences if found.seeds > 1]
    notes = [
        "Ours: percent, mean ± standard deviation over seeds; swaps: right comparisons, chance 50 "
        f"(group: 16.7), by {_JUDGES[scorer]}; R@1 re-ranked, held-out scenes, its differences "
        "those of the mean of both directions; p by a paired t-test."
    ]
    if deviations:
        seeds = min(found.seeds for found in differences if found.seeds > 1)
        typical = float(np.sqrt(np.mean(np.square(deviations))))
        notes.append(
            f"Differences of swaps varied by {typical:.1f} points between seeds: "
            f"{detectable(typical, seeds):.1f} points are what {seeds} seeds can detect."
        )
    return Table(table.title, head, rows, notes)


def _columns(results: Results, scorer: str) -> dict[str, str]:
    """Those that any result has: a corpus of single objects has swaps of places alone."""
    known = {name for result in results.values() for name in result["figures"]}
    wanted = {head: name.replace("{scorer}", scorer) for head, name in COLUMNS.items()}
    if scorer == "match":
        del wanted["ITM"]  # the other columns are its own
    return {head: name for head, name in wanted.items() if name.format(view="picture") in known}


def _row(
    row: RowConfig, table: TableConfig, columns: dict[str, str], results: Results, scorer: str
) -> list[str]:
    seeds = sorted(seed for name, seed in results if name == row.variant)
    cells = [row.label]
    for name in columns.values():
        if row.view != "picture" and not name.startswith("swaps"):
            cells.append("")
            continue
        figure = name.format(view=row.view)
        cells.append(
            mean_and_deviation(
                np.array([results[row.variant, seed]["figures"][figure] for seed in seeds])
            )
        )
    same, pictured = row.variant == table.reference, row.view == "picture"
    swaps = judged(results, row.variant, table.reference, scorer, row.view)
    recall = _compare(results, row.variant, table.reference, RECALL, RECALL)
    cells.append("" if same and pictured else str(swaps))
    cells.append("" if same or not pictured else str(recall))
    cells.append(str(len(seeds)))
    figures = [f"{figure:g}" for figure in row.paper] or [""] * len(table.paper)
    return [*cells, *figures]
