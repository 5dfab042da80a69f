"""Figures with chance level and interval, and the tables that show them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vlp.io import write_json


class Figure(NamedTuple):
    """A share between 0 and 1, its 95 % bootstrap interval, and what chance would give.

    One without an interval has its value at both ends.
    """

    value: float
    low: float
    high: float
    chance: float

    def percent(self) -> str:
        """`61.3 [55.1, 67.2]`, in percent; without brackets where there is no interval."""
        if self.low == self.value == self.high:
            return f"{100 * self.value:.1f}"
        return f"{100 * self.value:.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}]"


class Table(NamedTuple):
    """A title, column heads, rows of cells, and notes that belong under it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Lay out for the terminal."""
        drawn = aligned([self.head, *self.rows])
        drawn.insert(1, "-" * max(map(len, drawn)))
        return "\n".join([self.title, "", *drawn, "", *self.notes])

    def markdown(self) -> str:
        """Lay out for a file or a pull request."""
        align = ["---", *["---:"] * (len(self.head) - 1)]
        drawn = [f"| {' | '.join(line)} |" for line in (self.head, align, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *drawn, "", *self.notes]) + "\n"


def attributed(notes: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield each note once, after the names that have it where not all do."""
    said: dict[str, list[str]] = {}
    for name, own in notes.items():
        for note in dict.fromkeys(own):
            said.setdefault(note, []).append(name)
    for note, names in said.items():
        yield note if len(names) == len(notes) else f"{', '.join(names)}: {note}"


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Pad cells to columns, the first to the left and all others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    ]


def write_report(folder: str | Path, name: str, table: Table, figures: dict[str, Any]) -> Path:
    """Write `name.json` and `name.md` into a folder, made if missing, and return it."""
    folder = Path(folder)
    write_json(folder / f"{name}.json", figures, allow_nan=False)
    (folder / f"{name}.md").write_text(table.markdown(), encoding="utf-8")
    return folder
