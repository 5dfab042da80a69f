"""Tables of an ablation: means over seeds, paired t-tests with Holm's correction."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from evaluation.ablations.config import AblationConfig, RowConfig, TableConfig
from evaluation.latex import latex_table
from evaluation.results import Table
from vlp.config import ConfigError

try:
    import pandas as pd
except ImportError as error:
    raise ConfigError(f"ablations need pandas ({error}): pip install 'vlp[evaluation]'") from error

NOTES = (
    "Mean ± standard deviation over seeds. A difference without a name is that of the first "
    "column; differences are paired by seed, in brackets their 95 % interval (Student's t), p by a "
    "two-sided t-test, Holm: p corrected for all {tests} tests of this table. Where the ranks of "
    "all queries are stored, interval and p of a recall are those of a bootstrap over seeds and "
    "images."
)
RECALL = re.compile(r"(match|rerank|dual)/(\w+)/R@(\d+)")
RESAMPLES = 10_000
# Rank (from 1) of the best positive of every query, next to `result.json`.
QUERIES = "queries.csv"


def to_frame(results: Mapping[tuple[str, int], Mapping[str, float]]) -> pd.DataFrame:
    """Return a frame with a row per run, indexed by `variant` and `seed`, a column per figure."""
    index = pd.MultiIndex.from_tuples(list(results), names=["variant", "seed"])
    frame = pd.DataFrame(list(results.values()), index=index if len(results) else None)
    return frame.sort_index().sort_index(axis=1)


def read_figures(file: Path) -> pd.DataFrame:
    """Read a CSV of figures, as `report` writes it."""
    # Variants called by digits alone stay strings.
    return pd.read_csv(file, index_col=["variant", "seed"], dtype={"variant": str})


def report(config: AblationConfig, figures: pd.DataFrame) -> str:
    """Write all tables into `output`, and return them as text.

    `report.md` and `report.tex` (booktabs) hold the tables, `figures.csv` every figure of every
    run, `tests.csv` the tests.
    """
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    tables = [lay_out(table, figures, folder) for table in config.tables]
    (folder / "report.md").write_text("\n\n".join(t.markdown() for t in tables), "utf-8")
    (folder / "report.tex").write_text("\n".join(map(latex_table, tables)), "utf-8")
    figures.to_csv(folder / "figures.csv")
    pd.concat([paired_tests(table, figures, folder) for table in config.tables]).to_csv(
        folder / "tests.csv", index=False
    )
    return "\n\n".join(table.text() for table in tables)


def values_of(
    figures: pd.DataFrame, variant: str, names: Sequence[str], view: str = "image"
) -> pd.Series:
    """Return the mean of the figures `names` by seed, of runs that have all these figures."""
    names = [name.format(view=view) for name in names]
    # A frame without rows has no index level to select by.
    if len(figures):
        figures = figures[figures.index.get_level_values("variant") == variant]
    complete = figures.reindex(columns=names).dropna().astype(float)
    values = complete.mean(axis=1)
    return values.droplevel("variant") if len(values) else pd.Series(dtype=float)


def paired_tests(
    table: TableConfig, figures: pd.DataFrame, output: Path | None = None
) -> pd.DataFrame:
    """Compare each row with the table's reference over the seeds that both have.

    A recall with ranks in `output` is bootstrapped over seeds and images; every other figure has a
    paired t-test over seeds. Returns a line for each row and tested figure with two seeds or more:
    `mean`, `deviation`, `low` and `high` (95 % interval) of the differences, `p`, `holm`.
    """
    lines = []
    for row in table.rows:
        for head, names in _tested_figures(table).items():
            if not _has_view(row, names) or (
                row.view == "image" and row.variant == table.reference
            ):
                continue
            values = values_of(figures, row.variant, names, row.view)
            differences = (values - values_of(figures, table.reference, names)).dropna()
            # One seed has no standard deviation, so no test.
            if len(differences) > 1:
                labels = {"table": table.title, "row": row.label, "figure": head}
                test = paired_t_test(differences)
                if output is not None and all(map(RECALL.fullmatch, names)):
                    recalls = [
                        image_recall(output, variant, differences.index, names)
                        for variant in (row.variant, table.reference)
                    ]
                    # The bootstrap replaces the t-test's interval and p; the mean is the same.
                    if recalls[0] is not None and recalls[1] is not None:
                        test |= bootstrap(recalls[0] - recalls[1])
                lines.append({**labels, "reference": table.reference, **test})
    columns = ["table", "row", "figure", "reference", "seeds", "mean", "deviation", "low", "high"]
    tests = pd.DataFrame(lines, columns=[*columns, "p"])
    return tests.assign(holm=holm(tests["p"].tolist()))


def image_recall(
    output: Path, variant: str, seeds: Sequence[int], names: Sequence[str]
) -> np.ndarray | None:
    """Read recall in percent by seed and image, the mean of `names`; None without stored ranks."""
    files = [output / variant / str(seed) / QUERIES for seed in seeds]
    if not all(file.is_file() for file in files):
        return None
    rows = []
    for queries in map(pd.read_csv, files):
        recalls = []
        for name in names:
            stage, direction, k = RECALL.fullmatch(name).groups()  # type: ignore[union-attr]
            ranks = queries[queries["direction"] == direction]
            # All captions of an image are one unit of the bootstrap.
            recalls.append((ranks[stage] <= int(k)).groupby(ranks["image"]).mean())
        rows.append(100 * pd.concat(recalls, axis=1).mean(axis=1).sort_index().to_numpy())
    return np.stack(rows)


def bootstrap(differences: np.ndarray) -> dict[str, float]:
    """Resample seeds and, independently, images: 95 % interval and two-sided p-value of the mean.

    `differences` are (seeds, images), each the mean over the captions of an image.
    """
    # A fixed seed: equal runs have equal tables.
    random = np.random.default_rng(0)
    seeds, images = differences.shape
    means = np.array(
        [
            differences[random.integers(seeds, size=seeds)]
            .mean(0)[random.integers(images, size=images)]
            .mean()
            for _ in range(RESAMPLES)
        ]
    )
    low, high = np.percentile(means, [2.5, 97.5])
    # Counting the sample itself (+ 1) keeps p above 0.
    tail = min((means <= 0).sum(), (means >= 0).sum())
    return {"low": float(low), "high": float(high), "p": min(1.0, 2 * (tail + 1) / (RESAMPLES + 1))}


def paired_t_test(differences: Sequence[float]) -> dict[str, float]:
    """Test whether the mean difference of two seeds or more is 0, with its 95 % interval."""
    values = np.asarray(differences, dtype=float)
    mean, deviation = float(values.mean()), float(values.std(ddof=1))
    # scipy returns NaN for equal differences: p is 1 if they are 0, else 0.
    p = float(mean == 0) if deviation == 0 else float(stats.ttest_1samp(values, 0).pvalue)
    half_width = float(stats.t.ppf(0.975, len(values) - 1)) * deviation / math.sqrt(len(values))
    ends = {"low": mean - half_width, "high": mean + half_width}
    return {"seeds": len(values), "mean": mean, "deviation": deviation, **ends, "p": p}


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p values of one family by Holm's step-down method (Holm 1979)."""
    # The i-th smallest of m is multiplied by m - i + 1; then p is made non-decreasing, at most 1.
    values = np.asarray(p, dtype=float)
    order = np.argsort(values, kind="stable")
    holm_p = np.empty_like(values)
    factors = np.arange(len(values), 0, -1)
    holm_p[order] = np.minimum(1, np.maximum.accumulate(factors * values[order]))
    return [float(value) for value in holm_p]


def lay_out(table: TableConfig, figures: pd.DataFrame, output: Path | None = None) -> Table:
    """Lay out means, differences from the reference, and the paper's figures."""
    tests = paired_tests(table, figures, output)
    by_cell = tests.set_index(["row", "figure"])
    tested = _tested_figures(table)
    rows: list[list[str]] = []
    for row in table.rows:
        cells = [row.label]
        for name in table.figures.values():
            values = values_of(figures, row.variant, [name], row.view)
            cells.append(_mean_text(values, table.decimals) if _has_view(row, [name]) else "")
        for head, names in tested.items():
            if (row.label, head) in by_cell.index:
                cells.append(_difference_text(by_cell.loc[(row.label, head)], table.decimals))
            else:
                # Empty for the reference, and for views that the figure does not have.
                is_reference = row.view == "image" and row.variant == table.reference
                cells.append("" if is_reference or not _has_view(row, names) else "–")
        cells.append(str(_num_seeds(figures, row.variant)))
        cells += [f"{figure:g}" for figure in row.paper] or [""] * len(table.paper)
        rows.append(cells)
    labels = {head: "" if head == next(iter(table.figures)) else head for head in tested}
    heads = [f"{name} − {table.reference}".strip() for name in labels.values()]
    columns = ["", *table.figures, *heads, "seeds", *(f"paper: {head}" for head in table.paper)]
    return Table(table.title, columns, rows, [NOTES.format(tests=len(tests))])


def stored_tables(config: AblationConfig, figures: pd.DataFrame) -> list[Table]:
    """Lay out the tables with figures of their reference and of another variant."""
    stored = {*figures.index.get_level_values("variant")}
    return [
        lay_out(table, figures)
        for table in config.tables
        if table.reference in stored and len(stored & {row.variant for row in table.rows}) > 1
    ]


def _tested_figures(table: TableConfig) -> dict[str, Sequence[str]]:
    """Return the figures whose mean is tested, by head of the difference."""
    head, name = next(iter(table.figures.items()))
    return dict(table.tested) or {head: [name]}


def _has_view(row: RowConfig, names: Sequence[str]) -> bool:
    """Return True if the figures exist for the row's view."""
    return row.view == "image" or all("{view}" in name for name in names)


def _num_seeds(figures: pd.DataFrame, variant: str) -> int:
    return int((figures.index.get_level_values("variant") == variant).sum()) if len(figures) else 0


def _mean_text(values: pd.Series, decimals: int) -> str:
    """Return `71.0 ± 1.2`, or a dash without values."""
    if not len(values):
        return "–"
    spread = f" ± {values.std(ddof=1):.{decimals}f}" if len(values) > 1 else ""
    return f"{values.mean():.{decimals}f}{spread}"


def _difference_text(test: Any, decimals: int) -> str:
    """Return `+3.1 [0.1, 6.1], p 0.041, Holm 0.082`."""
    mean, low, high = (f"{test[key]:.{decimals}f}" for key in ("mean", "low", "high"))
    sign = "" if mean.startswith("-") else "+"
    p, holm_p = (f"{test[key]:.3f}" if test[key] >= 0.001 else "< 0.001" for key in ("p", "holm"))
    return f"{sign}{mean} [{low}, {high}], p {p}, Holm {holm_p}"
