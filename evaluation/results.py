"""Figures with chance level and interval, tables, and result files as JSON and JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from evaluation.samples import EvaluationError, format_kinds
from vlp.data.image.transforms import View
from vlp.io import atomic_write, parse_json, write_json


class Figure(NamedTuple):
    """A share between 0 and 1, its 95 % bootstrap interval, and its chance level."""

    value: float
    # Without an interval, both bounds are the value.
    low: float
    high: float
    chance: float

    def percent(self) -> str:
        """Format as `61.3 [55.1, 67.2]`, in percent; without brackets if there is no interval."""
        if self.low == self.value == self.high:
            return f"{100 * self.value:.1f}"
        return f"{100 * self.value:.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}]"

    def chance_percent(self) -> str:
        """Format chance as `16.7`, in percent; empty where there is no chance level."""
        return f"{100 * self.chance:.1f}" if self.chance else ""


class Table(NamedTuple):
    """A title, column heads, rows of cells, and notes that belong under it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Lay out for the terminal."""
        lines = align([self.head, *self.rows])
        lines.insert(1, "-" * max(map(len, lines)))
        return "\n".join([self.title, "", *lines, "", *self.notes])

    def markdown(self) -> str:
        """Lay out for a file or a pull request."""
        rule = ["---", *["---:"] * (len(self.head) - 1)]
        lines = [f"| {' | '.join(line)} |" for line in (self.head, rule, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines, "", *self.notes]) + "\n"


def merge_notes(notes: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield each distinct note, with the names of its models in front unless all have it."""
    models_of: dict[str, list[str]] = {}
    for model, model_notes in notes.items():
        for note in dict.fromkeys(model_notes):
            models_of.setdefault(note, []).append(model)
    for note, models in models_of.items():
        yield note if len(models) == len(notes) else f"{', '.join(models)}: {note}"


def align(lines: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells as lines of text: first column left-aligned, others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    ]


def write_report(folder: str | Path, name: str, table: Table, figures: dict[str, Any]) -> Path:
    """Write `name.json` and `name.md` into `folder`, created if missing; return the folder."""
    folder = Path(folder)
    # A NaN figure is a defect, and invalid JSON.
    write_json(folder / f"{name}.json", figures, allow_nan=False)
    (folder / f"{name}.md").write_text(table.markdown(), encoding="utf-8")
    return folder


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines, atomically; the file's folder is created if missing."""
    with atomic_write(path, "w") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines, one object each."""
    rows: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                row = parse_json(line)
                if not isinstance(row, dict):
                    raise ValueError(f"found {type(row).__name__}")
                rows.append(row)
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        message = f"{path}, line {len(rows) + 1}: not a JSON object ({error})"
        raise EvaluationError(message) from error
    return rows


@dataclass(frozen=True)
class Result:
    """Result of one model on one set; `kind` names its files.

    counts: numbers of evaluated items. figures: shares between 0 and 1 by name, the main figure
    first. predictions: a row per item with ids for a submission, and for annotated items `scores`
    by figure and `image`, equal for items of one image; None if no rows are stored. skipped: number
    of skipped samples by kind. notes: sentences under the table. view: images that the model saw,
    if this is an option. facts: further values of the JSON file.
    """

    kind: str
    counts: dict[str, int]
    shards: tuple[str, ...]
    figures: dict[Any, Figure]
    predictions: list[dict[str, Any]] | None = None
    skipped: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    view: View | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """Return the figures' values, by which a run chooses its best model."""
        return {name: figure.value for name, figure in self.figures.items()}

    def table(self) -> Table:
        """Return a row per figure: percent with interval, and chance level."""
        rows = [
            [name, figure.percent(), figure.chance_percent()]
            for name, figure in self.figures.items()
        ]
        title = f"{self.kind}: {self.counts['items']} items"
        return Table(title, ["", "value", "chance"], rows, self.table_notes(skipped="items"))

    def table_notes(self, over: str = "images", skipped: str = "samples") -> list[str]:
        """Return the notes below the table.

        over: resampled units of intervals. skipped: plural noun of left-out samples.
        """
        notes = [f"Percent; in brackets 95 % bootstrap intervals over {over}.", *self.notes]
        if self.skipped:
            notes.append(f"Skipped {skipped}: {format_kinds(self.skipped)}.")
        return notes

    def plain_figures(self) -> dict[str, Any]:
        """Return the part of the JSON file that holds figures."""
        figures = {
            name if isinstance(name, str) else "/".join(name): figure._asdict()
            for name, figure in self.figures.items()
        }
        return {"figures": figures}

    def to_json(self) -> dict[str, Any]:
        """Return everything but the predictions, as plain JSON values; figures are shares."""
        return {
            "task": self.kind,
            "shards": list(self.shards),
            **self.counts,
            **self.facts,
            "skipped": self.skipped,
            "notes": list(self.notes),
            **({} if self.view is None else {"view": self.view}),
            **self.plain_figures(),
        }

    def save(self, folder: str | Path) -> Path:
        """Write `KIND.json`, `KIND.md` and, of predictions, `KIND.predictions.jsonl`."""
        path = write_report(folder, self.kind, self.table(), self.to_json())
        if self.predictions is not None:
            write_lines(path / f"{self.kind}.predictions.jsonl", self.predictions)
        return path


ARROWS = {"text_to_image": "text → image", "image_to_text": "image → text", "both": "both"}


class SavedFigures(NamedTuple):
    """Figures by name, and the name of the figure that a summary shows."""

    figures: dict[str, Figure]
    main: str


def saved_figures(content: Mapping[str, Any]) -> SavedFigures:
    """Read the figures in the content of a KIND.json; for retrieval, of its last stage."""
    try:
        # Only retrieval has a list of figures, as their keys have three parts.
        if isinstance(content.get("figures"), list):
            *_, last = figures_by_stage(content["figures"]).values()
            return SavedFigures(last, "both mean")
        if content["task"] == "pointing":
            return _pointing_figures(content)
        figures = {name: Figure(**figure) for name, figure in content["figures"].items()}
        main = "match/all/group" if content["task"] == "swaps" else next(iter(figures))
        return SavedFigures(figures, main)
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ValueError(f"not the figures of a result ({error!r})") from error


def figures_by_stage(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Figure]]:
    """Return the figures of retrieval by stage and name, from the rows of its JSON file."""
    stages: dict[str, dict[str, Figure]] = {}
    for row in rows:
        figure = Figure(*(float(row[name]) for name in Figure._fields))
        stages.setdefault(row["stage"], {})[f"{ARROWS[row['direction']]} {row['name']}"] = figure
    return stages


def _pointing_figures(content: Mapping[str, Any]) -> SavedFigures:
    figures = {}
    for kind, kind_figures in content["kinds"].items():
        for name, label in (("pointing", "in its box"), ("any_object", "in any box")):
            figures[f"{kind} words {label}"] = Figure(**kind_figures[name])
        for name, figure in kind_figures.get("controls", {}).items():
            figures[f"{kind} words by {name}"] = Figure(**figure)
    return SavedFigures(figures, next(iter(figures)))


def reranked_top(rerank: int, images: int, texts: int) -> int:
    """Return the largest number of re-ranked candidates of a query: at most all images or texts."""
    return min(rerank, max(images, texts))


def truncation_notes(num_truncated: int, count: int, texts: str) -> tuple[str, ...]:
    """Return a note on truncated texts, empty for 0; `texts`: plural noun in the note."""
    note = f"{num_truncated} of {count} {texts} are truncated to max_tokens."
    return (note,) if num_truncated else ()


UNTRAINED_MATCH = "its cross-modal encoder was never trained to match (no ITM)"


def untrained_match_notes(trained: bool, subject: str) -> tuple[str, ...]:
    """Return a note that `subject` depends on an untrained match score; empty if `trained`."""
    if trained:
        return ()
    return (f"The match score was never trained (no ITM): {subject} is meaningless.",)
