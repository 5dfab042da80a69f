"""Tables of a results page as JSON: figures that no ablation made, but commands of their own."""

from __future__ import annotations

import json
import re
from typing import Any

PAGES = ("photographs", "downstream")
"""Pages of docs/results whose tables are kept as JSON."""

_NUMBER = r"[+-]?\d+(?:,\d{3})*(?:\.\d+)?"
_CELL = re.compile(
    rf"({_NUMBER})(?: %)?(?: ± ({_NUMBER}))?(?: \[({_NUMBER}), ({_NUMBER})\])?(?:, p (?:= )?(.+))?"
)


def page_tables(markdown: str) -> list[dict[str, Any]]:
    """Every table of a page: the headings above it, its columns and its rows.

    A cell is a number, an object of `value` and `deviation`, `interval` (95 %) or `p` (a text, such
    as "< 0.001"), None where it is empty, or else its text.
    """
    found: list[dict[str, Any]] = []
    headings: dict[int, str] = {}
    columns: list[str] | None = None
    for line in markdown.splitlines():
        if heading := re.match(r"(#+) (.*)", line):
            level = len(heading[1])
            headings = {at: text for at, text in headings.items() if at < level}
            headings[level] = heading[2]
        if not line.startswith("|"):
            columns = None
            continue
        cells = [each.strip() for each in line.strip().strip("|").split("|")]
        if columns is None:
            columns = [_plain(each) for each in cells]
            found.append({"headings": [*headings.values()], "columns": columns, "rows": []})
        elif not set(line) <= set("|-: "):
            found[-1]["rows"].append([_cell(_plain(each)) for each in cells])
    return found


def page_json(markdown: str) -> str:
    """The tables of a page as JSON, a line for each row."""
    return "[\n" + ",\n".join(map(_table_json, page_tables(markdown))) + "\n]\n"


def _table_json(table: dict[str, Any]) -> str:
    head = json.dumps({**table, "rows": []}, ensure_ascii=False).removesuffix("]}")
    rows = ",\n".join(" " + json.dumps(row, ensure_ascii=False) for row in table["rows"])
    return f"{head}\n{rows}\n]}}"


def _plain(cell: str) -> str:
    """A cell without emphasis, code marks and targets of links, with the minus of numbers."""
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", cell)
    return text.replace("**", "").replace("`", "").replace("−", "-").strip()


def _cell(text: str) -> Any:
    match = _CELL.fullmatch(text)
    if match is None:
        return text or None
    value, deviation, low, high, p = match.groups()
    found = {
        "value": _number(value),
        "deviation": deviation and _number(deviation),
        "interval": low and [_number(low), _number(high)],
        "p": p,
    }
    kept = {name: each for name, each in found.items() if each is not None}
    return kept if len(kept) > 1 else kept["value"]


def _number(text: str) -> float:
    return float(text.replace(",", ""))
