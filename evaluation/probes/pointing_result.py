"""Result of a pointing evaluation: figures by kind of word, their tables and files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from evaluation.core.results import Figure, Table, write_report
from evaluation.probes.pointers import CONTROLS, POINTERS

KINDS = ("colour", "shape", "object", "objects")

BARS = ("any patch", "some object")
CONTROL_NOTES = (
    "Equal maxima share the point. cosine: the most similar patch; anchors: the patch that most",
    "channel groups anchor; path: the shortest; Grad-CAM: of the middle cross-modal layer.",
    "Controls read no word: attention of the image encoder's last block, the other images' boxes.",
)


class KindFigures(NamedTuple):
    """Figures of one kind of word; shares between 0 and 1.

    words: number of words. pointing: the most similar patch lies in the named object's
    box. some_object: expected `pointing` of a model that points into the box of an object chosen
    at random. any_object: the most similar patch lies in any object's box. anchors: of a word's
    anchors (patch and channel group with S at least the threshold) the share that lies in its box,
    over words that have any; None where no word has. controls: accuracies of all pointers and
    controls by name, where they were asked for (`evaluation.probes.pointers.pointer_figures`).
    """

    words: int
    pointing: Figure
    some_object: float
    any_object: Figure
    anchors: Figure | None
    controls: dict[str, Figure] | None = None


class PathFigures(NamedTuple):
    """Statistics of ACE-RPE over all words and patches, means over channel groups.

    anchors: share of entries (patch, word) with S at least the threshold. reachable: share of
    entries with a path. spread: standard deviation of a word's path over the patches it reaches,
    in patches and tokens; near 0 the position says nothing.
    """

    anchors: float
    reachable: float
    spread: float


@dataclass(frozen=True)
class PointingResult:
    """Pointing accuracy by kind of word.

    Kinds are `colour`, `shape`, `object`, and `objects`: words that may name any of several; with
    controls also `small object`, those of `object` in small boxes.
    paths: None for a model without ACE-RPE. remarks: notes of the model, under the table.
    """

    scenes: int
    shards: tuple[str, ...]
    kinds: dict[str, KindFigures]
    skipped: dict[str, int] = field(default_factory=dict)
    paths: PathFigures | None = None
    remarks: tuple[str, ...] = ()

    def table(self) -> Table:
        """One row for each kind of word, or with controls one column, in percent."""
        title, notes = f"Pointing, {self.scenes} images", self._notes()
        if any(figures.controls for figures in self.kinds.values()):
            return Table(title, *self._pointers(), [*notes, *CONTROL_NOTES])
        rows = [
            [
                f"{kind} words ({figures.words})",
                figures.pointing.percent(),
                f"{100 * figures.some_object:.1f}",
                f"{100 * figures.pointing.chance:.1f}",
                figures.any_object.percent(),
                f"{100 * figures.any_object.chance:.1f}",
                "–" if figures.anchors is None else figures.anchors.percent(),
            ]
            for kind, figures in self.kinds.items()
        ]
        head = [
            "",
            "in its box",
            "bar: some object",
            "chance",
            "in any box",
            "chance",
            "anchors in its box",
        ]
        return Table(f"Pointing of the most similar patch, {self.scenes} images", head, rows, notes)

    def _notes(self) -> list[str]:
        notes = ["Percent; in brackets 95 % bootstrap intervals over images."]
        if self.paths is not None:
            notes.append(
                f"Of all patches and words {self.paths.anchors:.1%} are anchors, "
                f"{self.paths.reachable:.1%} have a path; a word's paths have a standard deviation "
                f"of {self.paths.spread:.2f}."
            )
        return [*notes, *self.remarks]

    def _pointers(self) -> tuple[list[str], list[list[str]]]:
        """Return head and rows of the table with controls: two columns for each kind of word."""
        names = (*POINTERS, *CONTROLS)
        head, columns = [""], [[*POINTERS, *map("control: {}".format, CONTROLS), *BARS]]
        for kind, figures in self.kinds.items():
            found = figures.controls or {}
            best = next(name.partition(" - ")[2] for name in found if " - " in name)
            above = {name: found.get(f"{name} - {best}") for name in names}
            bars = (figures.pointing.chance, figures.some_object)
            head += [f"{kind} words ({figures.words})", f"above {best}"]
            columns.append([found[name].percent() if name in found else "" for name in names])
            columns[-1] += [f"{100 * bar:.1f}" for bar in bars]
            columns.append(["" if one is None else one.percent() for one in above.values()])
            columns[-1] += [""] * len(bars)
        return head, [list(row) for row in zip(*columns)]

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values; figures are shares."""
        kinds = {}
        for kind, figures in self.kinds.items():
            plain = figures._asdict()
            for name in ("pointing", "any_object", "anchors"):
                plain[name] = None if plain[name] is None else plain[name]._asdict()
            controls = plain.pop("controls")
            if controls is not None:
                plain["controls"] = {name: one._asdict() for name, one in controls.items()}
            kinds[kind] = plain
        return {
            "task": "pointing",
            "shards": list(self.shards),
            "scenes": self.scenes,
            "skipped": self.skipped,
            "notes": list(self.remarks),
            "kinds": kinds,
            "paths": None if self.paths is None else self.paths._asdict(),
        }

    def save(self, folder: str | Path) -> Path:
        """Write `pointing.json` and `pointing.md`."""
        return write_report(folder, "pointing", self.table(), self.to_json())
