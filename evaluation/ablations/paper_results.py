"""Tables 1 to 5 of the ACE-RPE paper as data, to stand beside one's own figures.

Figures are percent, as printed. Table 1's and 2's `Uniform` gives all words and patches one
distance. Table 3's rows `Ours` are Table 1's last two, and are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from data_tools.scenes import PARTS, SETTINGS_NAME

SOURCE = "the ACE-RPE paper"

RECALLS = tuple(f"{arrow} R@{k}" for arrow in ("image → text", "text → image") for k in (1, 5, 10))
"""Names of the figures of retrieval, in the order of the paper (TR, then IR)."""

Row = tuple[str, tuple[float | None, ...]]


class PaperTable(NamedTuple):
    """Values of one table of the paper for one data set.

    kind: of task, as `evaluation` names it. columns: (split, figure) of each value; the split is
    empty where the paper has one only.
    """

    number: int
    kind: str
    data: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]


def paper_tables(kind: str, shards: Sequence[str] | None = None) -> list[PaperTable]:
    """Tables about a kind of task; with shards, only about data that these are named after."""
    return [
        table
        for table in TABLES
        if table.kind == kind and (shards is None or all(_is(table.data, one) for one in shards))
    ]


def split_of(table: PaperTable, shards: Sequence[str]) -> str | None:
    """The paper's split that shards are named after, if it is a single one."""
    found = {
        split
        for split, _ in table.columns
        if split and all(re.search(rf"{split}(_|-|/|$)", one, re.IGNORECASE) for one in shards)
    }
    return found.pop() if len(found) == 1 and shards else None


def _is(data: str, folder: str) -> bool:
    return not _generated(Path(folder)) and bool(re.search(_NAMES[data], folder, re.IGNORECASE))


def _generated(folder: Path) -> bool:
    """Return whether the settings of `vlp data scenes` lie in a folder, or beside its part."""
    above = folder.name in PARTS and (folder.parent / SETTINGS_NAME).is_file()
    return above or (folder / SETTINGS_NAME).is_file()


_NAMES: Mapping[str, str] = {
    "Flickr30K": r"flickr[-_ ]?30k|f30k",
    "MS-COCO": r"(?<!ref)coco",
    "VQA v2": r"vqa[-_ ]?v?2|(^|/)vqa(/|$)",
    "SNLI-VE": r"snli",
    "NLVR2": r"nlvr[-_ ]?v?2",
    "RefCOCO+": r"refcoco(\+|[-_]?plus)",
}

_T1 = (
    ("None (4M)", "94.3 99.5 99.8 83.0 96.8 98.4", "72.6 91.2 95.7 56.5 81.3 89.1"),
    ("APE (4M)", "94.5 99.6 99.9 83.2 97.0 98.4", "73.0 91.3 95.8 56.7 81.5 89.2"),
    ("RPE (4M)", "94.4 99.5 99.9 83.2 97.1 98.4", "73.2 91.4 95.9 56.7 81.7 89.3"),
    ("APE + RPE (4M)", "94.5 99.6 99.9 83.3 97.2 98.5", "73.2 91.5 96.0 56.9 81.8 89.3"),
    ("Uniform (4M)", "94.6 99.6 99.9 83.3 97.3 98.5", "73.3 91.6 96.0 56.9 81.9 89.4"),
    ("ACE-RPE (4M)", "95.2 99.6 99.9 83.5 97.3 98.6", "73.9 92.0 96.5 57.6 82.0 90.1"),
    ("ACE-RPE + L_ace (4M)", "95.4 99.7 99.9 84.0 97.6 98.9", "74.2 92.2 96.8 57.9 82.4 90.2"),
    ("ACE-RPE + L_ace (14M)", "96.7 99.9 100.0 87.0 97.8 99.1", "78.9 95.2 97.7 61.4 85.3 91.0"),
)
_T3 = (
    ("UNITER (4M)", "87.3 98.0 99.2 75.6 94.1 96.8", "65.7 88.6 93.8 52.9 79.9 88.0"),
    ("VILLA (4M)", "87.9 97.5 98.8 76.3 94.2 96.8", "- - - - - -"),
    ("OSCAR (4M)", "- - - - - -", "70.0 91.1 95.5 54.0 80.8 88.5"),
    ("ALIGN (1.2B)", "95.3 99.8 100.0 84.9 97.4 98.6", "77.0 93.5 96.9 59.9 83.3 89.8"),
    ("ALBEF (4M)", "94.3 99.4 99.8 82.8 96.7 98.4", "73.1 91.4 96.0 56.8 81.5 89.2"),
    ("ALBEF (14M)", "95.9 99.8 100.0 85.6 97.5 98.9", "77.6 94.3 97.2 60.7 84.3 90.5"),
)
# VQA test-dev, test-std; SNLI-VE dev, test; NLVR2 dev, test.
_T2 = (
    ("None", "73.2 73.6", "79.2 79.5", "79.9 80.5"),
    ("APE", "73.9 74.1", "80.2 80.7", "80.6 81.0"),
    ("RPE", "73.8 73.9", "79.4 79.6", "80.3 80.7"),
    ("APE + RPE", "73.9 74.1", "80.1 80.9", "80.5 80.8"),
    ("Uniform", "74.1 74.2", "80.3 81.0", "80.5 80.9"),
    ("ACE-RPE", "74.9 75.1", "81.1 81.4", "81.3 81.7"),
    ("ACE-RPE + L_ace", "75.4 75.7", "81.4 82.0", "81.7 81.9"),
    ("ACE-RPE + L_ace (CC12M too)", "76.8 76.9", "82.0 82.5", "83.1 83.6"),
)
_T4 = (
    ("VisualBERT", "70.8 71.0", "- -", "67.4 67.0"),
    ("VL-BERT", "71.2 -", "- -", "- -"),
    ("LXMERT", "72.4 72.5", "- -", "74.9 74.5"),
    ("12-in-1", "73.2 -", "- 77.0", "- 78.9"),
    ("UNITER", "72.7 72.9", "78.6 78.3", "77.2 77.9"),
    ("VL-BART/T5", "- 71.3", "- -", "- 73.6"),
    ("ViLT", "70.9 -", "- -", "75.2 76.2"),
    ("OSCAR", "73.2 73.4", "- -", "78.1 78.4"),
    ("VILLA", "73.6 73.7", "79.4 79.0", "78.4 79.3"),
    ("ALBEF (4M)", "74.5 74.7", "80.1 80.3", "80.2 80.5"),
    ("ALBEF (14M)", "75.8 76.0", "80.8 80.9", "82.6 83.1"),
)
_T5 = (
    ("ARN", "32.8 34.4 32.1"),
    ("CCL", "34.3 36.9 33.6"),
    ("ALBEF", "58.5 65.9 46.3"),
    ("ACE-RPE (4M)", "59.4 66.6 47.1"),
    ("ACE-RPE + L_ace (4M)", "60.1 67.5 47.9"),
    ("ACE-RPE + L_ace (14M)", "60.5 67.9 48.2"),
)


def _read(rows: Sequence[tuple[str, ...]], part: int) -> tuple[Row, ...]:
    """Rows that have any figure in a part."""
    values = (
        (label, tuple(None if cell == "-" else float(cell) for cell in parts[part].split()))
        for label, *parts in rows
    )
    return tuple((label, cells) for label, cells in values if any(cells))


def _tables() -> list[PaperTable]:
    tables = []
    recalls = tuple(("", name) for name in RECALLS)
    for part, data in enumerate(("Flickr30K", "MS-COCO")):
        for number, rows in ((1, _T1), (3, _T3)):
            tables.append(PaperTable(number, "retrieval", data, recalls, _read(rows, part)))
    accuracies = (
        ("vqa", "VQA v2", ("test-dev", "test-std")),
        ("snli_ve", "SNLI-VE", ("dev", "test")),
        ("nlvr2", "NLVR2", ("dev", "test")),
    )
    for part, (kind, data, splits) in enumerate(accuracies):
        columns = tuple((split, "accuracy") for split in splits)
        for number, printed in ((2, _T2), (4, _T4)):
            tables.append(PaperTable(number, kind, data, columns, _read(printed, part)))
    boxes = tuple((split, "IoU ≥ 0.5") for split in ("val", "testA", "testB"))
    tables.append(PaperTable(5, "grounding", "RefCOCO+", boxes, _read(_T5, 0)))
    return tables


TABLES = tuple(_tables())
