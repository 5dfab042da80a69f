"""Files of one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from evaluation.core.samples import EvaluationError
from vlp.io import atomic_write, parse_json


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file in one step; its folder is made if missing."""
    with atomic_write(path, "w") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file.

    Raises:
        EvaluationError: it cannot be read, or a line is no JSON object.
    """
    rows = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                row = parse_json(line)
                if not isinstance(row, dict):
                    raise EvaluationError(f"{path}, line {number}: not a JSON object")
                rows.append(row)
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        if isinstance(error, EvaluationError):
            raise
        raise EvaluationError(f"{path}, line {len(rows) + 1}: not JSON ({error})") from error
    return rows
