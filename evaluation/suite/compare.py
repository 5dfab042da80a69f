"""Comparison of two results of the same task on the same items, with tests."""

from __future__ import annotations

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

# Signs in memory at once.
_SIGNS = 2**24


class ItemDifference(NamedTuple):
    """One figure of two models, second minus first."""

    # Means over the items.
    first: float
    second: float
    # With its 95 % bootstrap interval.
    difference: float
    low: float
    high: float
    # Two-sided, of the sign-flip test over images.
    p: float
    # Two-sided exact p; None for values other than 0 or 1.
    mcnemar: float | None
    # Items where one of both is higher.
    only_first: int
    only_second: int
    items: int


def item_difference(
    first: NDArray[np.floating],
    second: NDArray[np.floating],
    clusters: Sequence[Hashable],
    *,
    resamples: int = 2000,
    permutations: int = 10_000,
    seed: int = 0,
) -> ItemDifference:
    """Compare two models item by item; the smallest p is 1 / (permutations + 1)."""
    if not len(first) or len({len(first), len(second), len(clusters)}) > 1:
        raise ValueError(
            f"{len(first)} and {len(second)} values and {len(clusters)} images: a comparison "
            "needs as many of each, and one at least"
        )
    gap = np.asarray(second, dtype=float) - np.asarray(first, dtype=float)
    numbers: dict[Hashable, int] = {}
    cluster_ids = np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters])
    # Items of an image are not independent: images are drawn, and whole images change their sign.
    sums: NDArray[np.float64] = np.bincount(cluster_ids, gap).astype(float)
    weights = np.bincount(cluster_ids).astype(float)
    means = bootstrap_means(sums[:, None], weights[:, None], resamples=resamples, seed=seed)
    low, high = percentile_interval(means)
    return ItemDifference(
        first=float(np.mean(first)),
        second=float(np.mean(second)),
        difference=float(gap.mean()),
        low=float(low[0]),
        high=float(high[0]),
        p=sign_flip_p(sums, permutations, seed),
        mcnemar=_mcnemar(first, second),
        only_first=int((gap < 0).sum()),
        only_second=int((gap > 0).sum()),
        items=len(gap),
    )


def sign_flip_p(
    differences: NDArray[np.floating], permutations: int = 10_000, seed: int = 0
) -> float:
    """Return the two-sided p of the sum of independent differences under random signs."""
    nonzero = differences[differences != 0].astype(float)
    if not len(nonzero):
        return 1.0
    observed = abs(nonzero.sum()) - 1e-9 * np.abs(nonzero).sum()
    # Few differences get all signs; of more some are drawn, and the data count as one draw.
    if len(nonzero) <= 12:
        bits = (np.arange(2 ** len(nonzero))[:, None] >> np.arange(len(nonzero))) & 1
        return float((np.abs((1 - 2 * bits) @ nonzero) >= observed).mean())
    generator = np.random.default_rng(seed)
    step, extreme = max(1, _SIGNS // len(nonzero)), 0
    for start in range(0, permutations, step):
        size = (min(step, permutations - start), len(nonzero))
        signs = 1 - 2 * generator.integers(0, 2, size=size, dtype=np.int8)
        extreme += int((np.abs(signs @ nonzero) >= observed).sum())
    return (1 + extreme) / (1 + permutations)


def _mcnemar(first: NDArray[np.floating], second: NDArray[np.floating]) -> float | None:
    if not np.isin(first, (0, 1)).all() or not np.isin(second, (0, 1)).all():
        return None
    lost, won = int((first > second).sum()), int((second > first).sum())
    if lost + won == 0:
        return 1.0
    return float(stats.binomtest(won, lost + won).pvalue)


SUFFIX = ".predictions.jsonl"
_LISTED = 5
_TRUTH = {"True", "False"}

Row = dict[str, Any]
# By figure, the value of each item by its identity.
Values = dict[str, dict[tuple[Any, ...], float]]

# Field that marks the rows of a task -> fields that identify an item.
_IDENTITY = {
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
        """Return a row a figure, in percent."""
        rows = []
        for name, result in self.differences.items():
            points = (100 * value for value in (result.difference, result.low, result.high))
            interval = "{:+.1f} [{:+.1f}, {:+.1f}]".format(*points)
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
    first: str | Path,
    second: str | Path,
    task: str | None = None,
    *,
    resamples: int = 2000,
    permutations: int = 10_000,
) -> ResultComparison:
    """Compare two predictions files, or folders that hold them.

    first, second: KIND.predictions.jsonl, its folder, or a model folder with `evaluation` in it.
    task: KIND, where the folders hold several.
    """
    files = _files(Path(first), Path(second), task)
    parts = [_scored(file) for file in files]
    kinds = [_kind(rows[0], file) for rows, file in zip(parts, files)]
    if kinds[0] != kinds[1]:
        raise EvaluationError(f"{files[0]} and {files[1]} are results of different tasks")
    first_rows, second_rows = (_by_identity(rows, kinds[0]) for rows in parts)
    _check_same(first_rows, second_rows, files)
    images = {identity: row.get("image", row["key"]) for identity, row in first_rows.items()}
    values = [_values(rows, kinds[0]) for rows in (first_rows, second_rows)]
    differences = {}
    for name, first_values in values[0].items():
        if name not in values[1] or first_values.keys() != values[1][name].keys():
            continue
        differences[name] = item_difference(
            np.array(list(first_values.values())),
            np.array([values[1][name][identity] for identity in first_values]),
            [images.get(identity, identity) for identity in first_values],
            resamples=resamples,
            permutations=permutations,
        )
    if not differences:
        raise EvaluationError(f"{files[0]} and {files[1]} have no figure in common")
    return ResultComparison(str(files[0]), str(files[1]), len(set(images.values())), differences)


def _files(first: Path, second: Path, task: str | None) -> tuple[Path, Path]:
    if first.is_file() and second.is_file():
        return first, second
    first_files, second_files = _results(first), _results(second)
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


def _results(path: Path) -> dict[str, Path]:
    if path.is_file():
        return {_task_of(path): path}
    if not path.is_dir():
        raise EvaluationError(f"{path}: there is neither a folder nor a file of results")
    for folder in (path, results_folder(path), path / RESULTS):
        if files := sorted(folder.glob(f"*{SUFFIX}")):
            return {_task_of(file): file for file in files}
    raise EvaluationError(
        f"{path}: holds no *{SUFFIX}; make them with python -m evaluation TASK --out {path}"
    )


def _task_of(file: Path) -> str:
    return file.name.removesuffix(SUFFIX)


def _scored(file: Path) -> list[Row]:
    rows = read_lines(file)
    scored = [row for row in rows if "scores" in row or "ranks" in row]
    if not scored:
        raise EvaluationError(
            f"{file}: nothing in it was judged; `python -m evaluation TASK` writes scored "
            "predictions where there are labels"
        )
    return scored


def _kind(row: Row, file: Path) -> str:
    for name in _IDENTITY:
        if name in row:
            return name
    raise EvaluationError(f"{file}: not a file of predictions (its rows have {', '.join(row)})")


def _by_identity(rows: Sequence[Row], kind: str) -> dict[tuple[Any, ...], Row]:
    """Index rows by identity."""
    # Equal ones, as one key in two folders, are told apart by their order.
    counts: Counter[tuple[Any, ...]] = Counter()
    indexed = {}
    for row in rows:
        identity = tuple(row.get(part) for part in _IDENTITY[kind])
        counts[identity] += 1
        indexed[*identity, counts[identity]] = row
    return indexed


def _check_same(
    first: dict[tuple[Any, ...], Row], second: dict[tuple[Any, ...], Row], files: Sequence[Path]
) -> None:
    problems = []
    for required, available, file in ((second, first, files[0]), (first, second, files[1])):
        missing = [_label(identity) for identity in required if identity not in available]
        if missing:
            more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
            problems.append(f"{file} lacks {', '.join(missing[:_LISTED])}{more}")
    if problems:
        raise EvaluationError(
            f"not the same items: {'; '.join(problems)}. Judge both models on the same shards"
        )
    for identity, row in first.items():
        if row.get("label") != second[identity].get("label"):
            raise EvaluationError(
                f"not the same labels: {_label(identity)} is {row.get('label')} in {files[0]} and "
                f"{second[identity].get('label')} in {files[1]}"
            )


def _label(identity: tuple[Any, ...]) -> str:
    return " ".join(str(part) for part in identity[:-1] if part is not None)


def _values(rows: dict[tuple[Any, ...], Row], kind: str) -> Values:
    values: Values = {}
    for identity, row in rows.items():
        scores = row["scores"] if "scores" in row else _recalls(row)
        for name, value in scores.items():
            values.setdefault(name, {})[identity] = float(value)
    if kind == "prediction" and {str(row.get("label")) for row in rows.values()} <= _TRUTH:
        values["consistency"] = _consistency(rows)
    return values


def _recalls(row: Row) -> dict[str, float]:
    arrow = row["direction"].replace("_to_", " → ")
    return {
        f"{arrow} R@{k}, {stage}": float(rank <= k)
        for stage, rank in row["ranks"].items()
        for k in RECALL_AT
    }


def _consistency(rows: dict[tuple[Any, ...], Row]) -> dict[tuple[Any, ...], float]:
    """Compute NLVR2's consistency by sentence: 1 if the model is right on all its pairs."""
    correct: dict[tuple[Any, ...], float] = {}
    for row in rows.values():
        # A sentence is right where it is right of every pair of images.
        sentence = ("sentence", sentence_of(row))
        correct[sentence] = min(correct.get(sentence, 1.0), row["scores"]["accuracy"])
    return correct
