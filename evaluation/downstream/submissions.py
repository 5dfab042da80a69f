"""Predictions in the file format of each benchmark.

Writers check rows (mappings) for repeated or non-numeric ids and unknown values, and are atomic.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evaluation.samples import EvaluationError
from vlp.io import write_text

LABELS = ("entailment", "neutral", "contradiction")
_MAX_LISTED = 5

Row = Mapping[str, Any]


class Submission(NamedTuple):
    """Submission format of a benchmark.

    required_field: field that every prediction needs. convert: turns a prediction into a row for
    `write`. missing: description of the field in the error; "": its name.
    """

    required_field: str
    write: Callable[[Path, Iterable[Row]], None]
    convert: Callable[[Row], Row] = dict
    missing: str = ""


def write_vqa(path: Path, rows: Iterable[Row]) -> None:
    """Write VQA's results file, a JSON list of {"question_id": number, "answer": text}."""
    _write_texts(path, rows, "question_id", "answer")


def write_captions(path: Path, rows: Iterable[Row]) -> None:
    """Write COCO's caption results, a JSON list of {"image_id": number, "caption": text}."""
    _write_texts(path, rows, "image_id", "caption")


def write_nlvr2(path: Path, rows: Iterable[Row]) -> None:
    """Write NLVR2 rows {"identifier", "label": bool}: CSV `identifier,True` without a header."""
    labels = []
    for row in rows:
        identifier = _id(row, "identifier", path)
        if "," in identifier or "\n" in identifier:
            raise EvaluationError(f"{path}: identifier {identifier!r} does not fit into a CSV line")
        label = _value(row, "label", path)
        if not isinstance(label, bool):
            raise EvaluationError(f"{path}: label {label!r} of {identifier} is not True or False")
        labels.append((identifier, label))
    _require_unique([identifier for identifier, _ in labels], "identifier", path)
    write_text(path, "".join(f"{identifier},{label}\n" for identifier, label in labels))


def write_snli_ve(path: Path, rows: Iterable[Row]) -> None:
    """Write SNLI-VE predictions, one JSON object {"pairID", "label"} a line."""
    labels = []
    for row in rows:
        pair, label = _id(row, "pairID", path), _value(row, "label", path)
        if label not in LABELS:
            choices = ", ".join(LABELS)
            raise EvaluationError(f"{path}: label {label!r} of {pair} is not one of {choices}")
        labels.append({"pairID": pair, "label": label})
    _require_unique([row["pairID"] for row in labels], "pairID", path)
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in labels))


def write_refcoco(path: Path, rows: Iterable[Row]) -> None:
    """Write boxes of referring expressions, a JSON list of {"sent_id": number, "box"}.

    Boxes are [x, y, width, height] in pixels.
    """
    boxes = []
    for row in rows:
        identifier = _number(row, "sent_id", path)
        boxes.append((identifier, _box(row, f"sent_id {identifier}", path)))
    _require_unique([identifier for identifier, _ in boxes], "sent_id", path)
    _write_list(path, [{"sent_id": identifier, "box": box} for identifier, box in boxes])


def _write_texts(path: Path, rows: Iterable[Row], id_field: str, text_field: str) -> None:
    texts = [(_number(row, id_field, path), _value(row, text_field, path)) for row in rows]
    _require_unique([identifier for identifier, _ in texts], id_field, path)
    _write_list(path, [{id_field: identifier, text_field: text} for identifier, text in texts])


def _value(row: Row, name: str, path: Path) -> Any:
    if name not in row:
        raise EvaluationError(f"{path}: a prediction has no {name}: {json.dumps(dict(row))[:200]}")
    return row[name]


def _id(row: Row, name: str, path: Path) -> str:
    text = str(_value(row, name, path))
    if not text:
        raise EvaluationError(f"{path}: a prediction has an empty {name}")
    return text


def _number(row: Row, name: str, path: Path) -> int:
    value = _value(row, name, path)
    # Shards keep ids as text; int() alone would also take 1.5, True, "1_000" and " 7".
    if isinstance(value, bool) or not str(value).isascii() or not str(value).isdigit():
        raise EvaluationError(
            f"{path}: {name} {value!r} is not a number; the format needs the official files' "
            "numbers, so use shards that were made from these files"
        )
    return int(value)


def _box(row: Row, owner: str, path: Path) -> list[float]:
    """Return the box [x, y, width, height] of a row; `owner` names the row in the error."""
    value = _value(row, "box", path)
    try:
        box = [float(number) for number in value]
    except (TypeError, ValueError):
        box = []
    if len(box) != 4 or not all(map(math.isfinite, box)) or min(box[2:]) <= 0:
        raise EvaluationError(
            f"{path}: box {value!r} of {owner} must be finite [x, y, width, height], with sides > 0"
        )
    return box


def _require_unique(ids: Sequence[int | str], name: str, path: Path) -> None:
    repeated = [str(identifier) for identifier, count in Counter(ids).items() if count > 1]
    if repeated:
        more = f" and {len(repeated) - _MAX_LISTED} more" if len(repeated) > _MAX_LISTED else ""
        listing = ", ".join(repeated[:_MAX_LISTED]) + more
        raise EvaluationError(f"{path}: predicted more than once: {name} {listing}")


def _write_list(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as one JSON list."""
    write_text(path, json.dumps(rows, ensure_ascii=False) + "\n")
