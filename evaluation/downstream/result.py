"""Figures of a fine-tuned model on its benchmark, and what it predicted."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluation.core.json_lines import write_lines
from evaluation.core.results import Figure, Table, write_report
from evaluation.core.samples import EvaluationError, kinds_in_words
from vlp.data.image.ablated_views import View
from vlp.metrics.bootstrap import bootstrap_means, percentile_interval


@dataclass(frozen=True)
class TaskResult:
    """Result of one model on one set.

    figures: shares between 0 and 1 by name, the first is the main one. predictions: one row an
    item, with the ids that a submission needs; those with truth have `scores`, the item's
    value by figure, and `image`, which items of one image share. skipped: bad samples by kind.
    notes: what belongs under the table. view: what the model was shown, where there is a choice.
    """

    kind: str
    items: int
    shards: tuple[str, ...]
    figures: dict[str, Figure]
    predictions: list[dict[str, Any]]
    skipped: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    view: View | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Return the figures' values, by which a run chooses its best model."""
        return {name: figure.value for name, figure in self.figures.items()}

    def table(self) -> Table:
        """Return percent with intervals, and chance where there is one."""
        rows = [
            [name, figure.percent(), f"{100 * figure.chance:.1f}" if figure.chance else ""]
            for name, figure in self.figures.items()
        ]
        notes = ["Percent; in brackets 95 % bootstrap intervals over images.", *self.notes]
        if self.skipped:
            kinds = kinds_in_words(self.skipped)
            notes.append(f"Skipped items: {kinds}.")
        return Table(f"{self.kind}: {self.items} items", ["", "value", "chance"], rows, notes)

    def to_json(self) -> dict[str, Any]:
        """Return everything but the predictions, as plain JSON values; figures are shares."""
        return {
            "task": self.kind,
            "shards": list(self.shards),
            "items": self.items,
            "skipped": self.skipped,
            "notes": list(self.notes),
            **({} if self.view is None else {"view": self.view}),
            "figures": {name: figure._asdict() for name, figure in self.figures.items()},
        }

    def save(self, folder: str | Path) -> Path:
        """Write `KIND.json`, `KIND.md` and `KIND.predictions.jsonl`."""
        path = write_report(folder, self.kind, self.table(), self.to_json())
        write_lines(path / f"{self.kind}.predictions.jsonl", self.predictions)
        return path


def sentence_of(row: Mapping[str, Any]) -> str:
    """Return what consistency counts as one sentence, as the official evaluators do.

    NLVR2's identifiers are split-set-pair-sentence, NLVR v1's sentence-image; equal words in two
    sets are two sentences. Without an identifier the words decide.
    """
    parts = str(row.get("identifier") or "").split("-")
    if len(parts) == 4:
        return "-".join((parts[0], parts[1], parts[3]))
    return f"{parts[0]}: {row['text']}" if len(parts) == 2 else str(row["text"])


def with_truth(
    rows: Sequence[dict[str, Any]], truth: str, shards: Sequence[str], nobody: str
) -> list[dict[str, Any]]:
    """Return the rows whose field `truth` people have filled in.

    Raises:
        EvaluationError: there is none; `nobody` says so of the shards.
    """
    found = [row for row in rows if row[truth]]
    if not found:
        raise EvaluationError(
            f"{', '.join(shards)}: {nobody}; "
            "`python -m evaluation predict` writes predictions without scoring them"
        )
    return found


def clustered_figures(
    values: Mapping[str, NDArray[Any]],
    clusters: Sequence[Hashable],
    chances: Mapping[str, float],
    resamples: int = 1000,
    counted: Mapping[str, NDArray[Any]] | None = None,
) -> dict[str, Figure]:
    """Compute means with 95 % intervals from resampled clusters, the same draws for every figure.

    Args:
        values: of each item, by figure.
        clusters: what the items of one image have in common.
        chances: by figure; 0 where there is no such thing.
        resamples: bootstrap draws.
        counted: by figure, the items that it is about, or their weights; all where it is not named.
    """
    numbers: dict[Hashable, int] = {}
    own = np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters])
    sums, weights = [], []
    for name, value in values.items():
        about = np.ones(len(own)) if counted is None or name not in counted else counted[name]
        sums.append(np.bincount(own, np.asarray(value, dtype=float) * about, len(numbers)))
        weights.append(np.bincount(own, np.asarray(about, dtype=float), len(numbers)))
    total, weight = np.stack(sums, axis=1), np.stack(weights, axis=1)
    point = total.sum(0) / weight.sum(0)
    low, high = percentile_interval(bootstrap_means(total, weight, resamples=resamples))
    return {
        name: Figure(float(point[k]), float(low[k]), float(high[k]), chances.get(name, 0.0))
        for k, name in enumerate(values)
    }


def keep_scores(
    rows: Sequence[dict[str, Any]],
    values: Mapping[str, NDArray[Any]],
    counted: Mapping[str, NDArray[np.bool_]] | None = None,
) -> None:
    """Note in each row its value by figure, so that two results can be compared item by item.

    Args:
        rows: with truth.
        values: of each row, by figure.
        counted: as in `clustered_figures`.
    """
    about = counted or {}
    for number, row in enumerate(rows):
        row["scores"] = {
            name: float(value[number])
            for name, value in values.items()
            if name not in about or about[name][number]
        }
