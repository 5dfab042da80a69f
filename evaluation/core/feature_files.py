"""Feature rows as .npy files with a line of JSON each, written piece by piece by several ranks.

Every rank appends to files of its own in OUT.tmp; at the end the first rank joins them in the order
of the ranks, and OUT.tmp becomes OUT. What is interrupted leaves no OUT.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluation.core.samples import EvaluationError
from evaluation.core.work_sharding import Ranks
from vlp.io import parse_json


class FeatureFiles:
    """Writes NAME.npy (rows, width) and NAME.jsonl for some names.

    Args:
        out: folder to be made; ranks share it.
        names: of the files.
        width: of the features.
        dtype: of the features, "float32" or "float16".
        ranks: who writes.

    Raises:
        EvaluationError: there is something at `out`, or it cannot be made.
    """

    def __init__(
        self, out: Path, names: Sequence[str], width: int, dtype: str, ranks: Ranks | None = None
    ) -> None:
        self._out, self._names, self._width, self._dtype = out, names, width, np.dtype(dtype)
        self._ranks = ranks or Ranks.current()
        self._parts = out.with_name(out.name + ".tmp")
        if out.is_file() or (out.is_dir() and any(out.iterdir())):
            raise EvaluationError(f"--out {out}: is there already; name another folder")
        self._ranks.map_blocks(1, lambda _: self._start())
        self._rows = dict.fromkeys(names, 0)

    def add(self, name: str, features: NDArray[Any], rows: Sequence[Mapping[str, Any]]) -> int:
        """Append (rows, width) features and their lines; gives this rank's row of the first."""
        first = self._rows[name]
        data, lines = self._files(name, self._ranks.rank)
        with data.open("ab") as file:
            file.write(np.ascontiguousarray(features, dtype=self._dtype).tobytes())
        with lines.open("a", encoding="utf-8") as text:
            text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self._rows[name] += len(features)
        return first

    def finish(self, refers: Mapping[str, str] | None = None) -> dict[str, int]:
        """Join what the ranks wrote, give the files their names, and the rows of each.

        Args:
            refers: name -> another name whose rows its lines number under that name, as they were
                on their rank; they become rows of the joined file.
        """
        ranks = self._ranks
        written = ranks.map_blocks(ranks.world_size, lambda _: self._rows)
        ranks.map_blocks(1, lambda _: self._join(written, refers or {}))
        return {name: sum(rows[name] for rows in written) for name in self._names}

    def _files(self, name: str, rank: int) -> tuple[Path, Path]:
        return self._parts / f"{name}.{rank}.raw", self._parts / f"{name}.{rank}.lines"

    def _start(self) -> None:
        try:
            if self._parts.is_dir():  # of a run that was interrupted
                shutil.rmtree(self._parts)
            self._parts.mkdir(parents=True)
        except OSError as error:
            raise EvaluationError(
                f"--out {self._out}: cannot be written ({error.strerror})"
            ) from error

    def _join(self, written: Sequence[dict[str, int]], refers: Mapping[str, str]) -> None:
        for name in self._names:
            shape = sum(rows[name] for rows in written), self._width
            with (
                (self._parts / f"{name}.npy").open("wb") as data,
                (self._parts / f"{name}.jsonl").open("w", encoding="utf-8") as lines,
            ):
                header = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(data, header)
                before = 0
                for rank, rows in enumerate(written):
                    parts = self._files(name, rank)
                    if parts[0].is_file():
                        with parts[0].open("rb") as part:
                            shutil.copyfileobj(part, data, 2**20)
                        with parts[1].open(encoding="utf-8") as part_lines:
                            for line in part_lines:
                                lines.write(_moved(line, refers.get(name), before))
                    parts[0].unlink(missing_ok=True)
                    parts[1].unlink(missing_ok=True)
                    before += rows[refers[name]] if name in refers else 0
        if self._out.is_dir():  # empty
            self._out.rmdir()
        self._parts.rename(self._out)


def _moved(line: str, reference: str | None, before: int) -> str:
    if reference is None:
        return line
    row = parse_json(line)
    row[reference] += before
    return json.dumps(row, ensure_ascii=False) + "\n"
