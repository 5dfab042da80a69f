"""Comparison of two results of the same task on the same items, with tests."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from evaluation.downstream.task_evaluation import sentence_of
from evaluation.results import Table, read_lines, write_report
from evaluation.samples import EvaluationError
from vlp.metrics import RECALL_AT, bootstrap_means, percentile_interval
from vlp.models.pretrained.local_copy import RESULTS, results_folder

# Random signs in memory at once.
_MAX_SIGNS = 2**24


class ItemDifference(NamedTuple):
    """One figure of two models on the same items."""

    # Means over the items.
    first: float
    second: float
    # Second minus first, with 95 % bootstrap interval.
    difference: float
    low: float
    high: float
    # Two-sided p of the sign-flip test over images.
    p: float
    # Two-sided exact p of McNemar's test; None for values other than 0 or 1.
    mcnemar: float | None
    # Numbers of items: with a higher first value, with a higher second value, and all.
    only_first: int
    only_second: int
    items: int


def item_difference(
    first: NDArray[np.floating],
    second: NDArray[np.floating],
    clusters: Sequence[Hashable],
    permutations: int = 10_000,
) -> ItemDifference:
    """Compare the values (items,) of two models; `clusters` are the images of the items.

    With more than 12 images, the smallest sign-flip p is 1 / (permutations + 1).
    """
    differences = np.asarray(second, dtype=float) - np.asarray(first, dtype=float)
    ids: dict[Hashable, int] = {}
    cluster_ids = np.array([ids.setdefault(cluster, len(ids)) for cluster in clusters])
    # Items of an image are not independent: images are resampled, and whole images flip their sign.
    sums: NDArray[np.float64] = np.bincount(cluster_ids, differences).astype(float)
    weights = np.bincount(cluster_ids).astype(float)
    means = bootstrap_means(sums[:, None], weights[:, None], resamples=2000)
    low, high = percentile_interval(means)
    return ItemDifference(
        first=float(np.mean(first)),
        second=float(np.mean(second)),
        difference=float(differences.mean()),
        low=float(low[0]),
        high=float(high[0]),
        p=sign_flip_p(sums, permutations),
        mcnemar=_mcnemar(first, second),
        only_first=int((differences < 0).sum()),
        only_second=int((differences > 0).sum()),
        items=len(differences),
    )


def sign_flip_p(differences: NDArray[np.floating], permutations: int) -> float:
    """Return the two-sided p of the sum of independent differences under random signs."""
    nonzero = differences[differences != 0].astype(float)
    if not len(nonzero):
        return 1.0
    # Sums that differ by rounding alone count as equal.
    observed = abs(nonzero.sum()) - 1e-9 * np.abs(nonzero).sum()
    # Exact over all sign patterns if they are few; else over random ones and the observed one.
    if len(nonzero) <= 12:
        bits = (np.arange(2 ** len(nonzero))[:, None] >> np.arange(len(nonzero))) & 1
        return float((np.abs((1 - 2 * bits) @ nonzero) >= observed).mean())
    generator = np.random.default_rng(0)
    chunk, num_extreme = max(1, _MAX_SIGNS // len(nonzero)), 0
    for start in range(0, permutations, chunk):
        size = (min(chunk, permutations - start), len(nonzero))
        signs = 1 - 2 * generator.integers(0, 2, size=size, dtype=np.int8)
        num_extreme += int((np.abs(signs @ nonzero) >= observed).sum())
    return (1 + num_extreme) / (1 + permutations)


def _mcnemar(first: NDArray[np.floating], second: NDArray[np.floating]) -> float | None:
    """Return the two-sided exact p of McNemar's test; None unless all values are 0 or 1."""
    if not np.isin(first, (0, 1)).all() or not np.isin(second, (0, 1)).all():
        return None
    only_first, only_second = int((first > second).sum()), int((second > first).sum())
    if only_first + only_second == 0:
        return 1.0
    return float(stats.binomtest(only_second, only_first + only_second).pvalue)


SUFFIX = ".predictions.jsonl"
# Items that an error lists.
_MAX_LISTED = 5
_NLVR2_LABELS = {"True", "False"}

Row = dict[str, Any]
# Values of the fields that identify an item, see `_KEY_FIELDS`, and a count for repeats.
ItemKey = tuple[Any, ...]
# Value of each item, by figure.
Values = dict[str, dict[ItemKey, float]]

# Fields that identify a row's item, by the row's type: the first of these keys that it has.
_KEY_FIELDS = {
    "direction": ("direction", "key", "caption", "text"),
    "question_id": ("key", "question_id", "question"),
    "image_id": ("key", "image_id"),
    "point": ("key", "id", "text"),
    "foil": ("key", "kind", "caption", "foil"),
    "prediction": ("key", "identifier", "pairID", "text"),
    "key": ("key", "text"),
}


@dataclass(frozen=True)
class ResultComparison:
    """Differences of two results by figure, second minus first."""

    first: str
    second: str
    images: int
    differences: dict[str, ItemDifference]

    def table(self) -> Table:
        """Return a row per figure, in percent."""
        rows = []
        for name, result in self.differences.items():
            percents = (100 * value for value in (result.difference, result.low, result.high))
            interval = "{:+.1f} [{:+.1f}, {:+.1f}]".format(*percents)
            rows.append(
                [
                    name,
                    str(result.items),
                    f"{100 * result.first:.1f}",
                    f"{100 * result.second:.1f}",
                    interval,
                    f"{result.p:.4f}",
                    "" if result.mcnemar is None else f"{result.mcnemar:.4f}",
                    f"{result.only_first} / {result.only_second}",
                ]
            )
        notes = [
            f"A: {self.first}",
            f"B: {self.second}",
            "Percent; in brackets 95 % paired bootstrap intervals over images. p: sign-flip test "
            "over images; McNemar: exact, over items. Each row is tested by itself.",
        ]
        head = ["", "items", "A", "B", "B - A", "p", "McNemar", "only A / B better"]
        return Table(f"B against A on {self.images} images", head, rows, notes)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values; figures are shares."""
        return {
            "first": self.first,
            "second": self.second,
            "images": self.images,
            "figures": {
                name: difference._asdict() for name, difference in self.differences.items()
            },
        }

    def save(self, folder: str | Path) -> Path:
        """Write `compare.json` and `compare.md`."""
        return write_report(folder, "compare", self.table(), self.to_json())


def compare(
    first: str | Path, second: str | Path, task: str | None = None, permutations: int = 10_000
) -> ResultComparison:
    """Compare two files of predictions on the same items.

    first, second: KIND.predictions.jsonl, its folder, or a model folder with `evaluation` in it.
    task: KIND, needed if both folders hold several.
    """
    files = _predictions_files(Path(first), Path(second), task)
    first_rows, second_rows = map(_read_scored, files)
    row_type = _row_type(first_rows[0], files[0])
    if row_type != _row_type(second_rows[0], files[1]):
        raise EvaluationError(f"{files[0]} and {files[1]} are results of different tasks")
    first_items = _rows_by_item(first_rows, row_type)
    second_items = _rows_by_item(second_rows, row_type)
    _require_same_items(first_items, second_items, files)
    images = {item: row.get("image", row["key"]) for item, row in first_items.items()}
    first_figures, second_figures = _values(first_items, row_type), _values(second_items, row_type)
    differences = {}
    for name, first_values in first_figures.items():
        second_values = second_figures.get(name, {})
        if first_values.keys() != second_values.keys():
            continue
        differences[name] = item_difference(
            np.array(list(first_values.values())),
            np.array([second_values[item] for item in first_values]),
            # For NLVR2's consistency, items and clusters are sentences, which `images` lacks.
            [images.get(item, item) for item in first_values],
            permutations,
        )
    if not differences:
        raise EvaluationError(f"{files[0]} and {files[1]} have no figure in common")
    return ResultComparison(str(files[0]), str(files[1]), len(set(images.values())), differences)


def _predictions_files(first: Path, second: Path, task: str | None) -> tuple[Path, Path]:
    if first.is_file() and second.is_file():
        return first, second
    first_files, second_files = _files_by_task(first), _files_by_task(second)
    common = sorted(first_files.keys() & second_files.keys())
    selected = common if task is None else [name for name in common if name == task]
    if len(selected) == 1:
        return first_files[selected[0]], second_files[selected[0]]
    if len(selected) > 1:
        raise EvaluationError(f"both hold results of {', '.join(common)}: choose one with --task")
    raise EvaluationError(
        f"no results of the same task{'' if task is None else f' {task}'} in both: {first} has "
        f"{', '.join(first_files)}, {second} has {', '.join(second_files)}"
    )


def _files_by_task(path: Path) -> dict[str, Path]:
    folders = (path, results_folder(path), path / RESULTS)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        # Of the first folder with predictions.
        files = next(filter(None, (sorted(folder.glob(f"*{SUFFIX}")) for folder in folders)), [])
    else:
        raise EvaluationError(f"{path}: there is neither a folder nor a file of results")
    if not files:
        raise EvaluationError(
            f"{path}: holds no *{SUFFIX}; make one with `vlp evaluate TASK --out {path}`"
        )
    return {file.name.removesuffix(SUFFIX): file for file in files}


def _read_scored(file: Path) -> list[Row]:
    rows = [row for row in read_lines(file) if "scores" in row or "ranks" in row]
    if not rows:
        raise EvaluationError(
            f"{file}: no row has scores; `vlp evaluate TASK` writes them for annotated samples"
        )
    for row in rows:
        values = row.get("scores", row.get("ranks"))
        if (
            "key" not in row
            or not isinstance(values, dict)
            or not all(map(_is_finite, values.values()))
        ):
            raise EvaluationError(
                f"{file}: a row needs a `key`, and finite numbers as `scores` or `ranks`; found "
                f"{json.dumps(row)[:200]}"
            )
    return rows


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _row_type(row: Row, file: Path) -> str:
    for name in _KEY_FIELDS:
        if name in row:
            return name
    raise EvaluationError(f"{file}: not a file of predictions (its rows have {', '.join(row)})")


def _rows_by_item(rows: Sequence[Row], row_type: str) -> dict[ItemKey, Row]:
    # Rows with equal fields, such as one key in two folders, are numbered in their order.
    counts: Counter[ItemKey] = Counter()
    rows_by_item = {}
    for row in rows:
        item = tuple(row.get(part) for part in _KEY_FIELDS[row_type])
        counts[item] += 1
        rows_by_item[*item, counts[item]] = row
    return rows_by_item


def _require_same_items(
    first: dict[ItemKey, Row], second: dict[ItemKey, Row], files: Sequence[Path]
) -> None:
    problems = []
    for required, available, file in ((second, first, files[0]), (first, second, files[1])):
        missing = [_format_item(item) for item in required if item not in available]
        if missing:
            more = f" and {len(missing) - _MAX_LISTED} more" if len(missing) > _MAX_LISTED else ""
            problems.append(f"{file} lacks {', '.join(missing[:_MAX_LISTED])}{more}")
    if problems:
        raise EvaluationError(
            f"not the same items: {'; '.join(problems)}. Evaluate both models on the same shards"
        )
    for item, row in first.items():
        if row.get("label") != second[item].get("label"):
            raise EvaluationError(
                f"not the same labels: {_format_item(item)} is {row.get('label')} in {files[0]} "
                f"and {second[item].get('label')} in {files[1]}"
            )


def _format_item(item: ItemKey) -> str:
    # Without the count for repeats, which is last.
    return " ".join(str(part) for part in item[:-1] if part is not None)


def _values(rows: dict[ItemKey, Row], row_type: str) -> Values:
    values: Values = {}
    for item, row in rows.items():
        scores = row["scores"] if "scores" in row else _recalls(row)
        for name, value in scores.items():
            values.setdefault(name, {})[item] = float(value)
    labels = {str(row.get("label")) for row in rows.values()}
    if row_type == "prediction" and labels <= _NLVR2_LABELS:
        values["consistency"] = _consistency(rows)
    return values


def _recalls(row: Row) -> dict[str, float]:
    arrow = row["direction"].replace("_to_", " → ")
    return {
        f"{arrow} R@{k}, {stage}": float(rank <= k)
        for stage, rank in row["ranks"].items()
        for k in RECALL_AT
    }


def _consistency(rows: dict[ItemKey, Row]) -> dict[ItemKey, float]:
    """Return 1 for sentences of NLVR2 with right answers for all their image pairs, else 0."""
    correct: dict[ItemKey, float] = {}
    for row in rows.values():
        sentence = ("sentence", sentence_of(row))
        correct[sentence] = min(correct.get(sentence, 1.0), row["scores"]["accuracy"])
    return correct
