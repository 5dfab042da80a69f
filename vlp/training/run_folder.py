"""The folder of a run: its files, and when it may be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlp.config import ConfigError
from vlp.io import parse_json
from vlp.process.lock import is_lock


class RunFolder:
    """Places of a run's files.

    config: the resolved configuration; log: a JSON object per logged step; tensorboard: event
    files; checkpoints: folders `step_N`; model: public model folder of a finished run; best: that
    of the step that did best on the validation data, where there is one; report: summary of the
    run so far, written whenever it ends. Where a rank hung, `hang` holds its ranks' stacks.

    Raises:
        ConfigError: the folder holds something and the run is not resumed, or it cannot be used.
    """

    def __init__(self, path: str | Path, resume: bool) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.log = self.path / "log.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.best = self.path / "best"
        self.report = self.path / "report.json"
        self.hang = self.path / "hang"
        try:
            used = self.path.exists() and not all(map(is_lock, self.path.iterdir()))
        except OSError as error:
            raise ConfigError(f"output: {self.path} cannot be used ({error.strerror})") from error
        if used and not resume:
            raise ConfigError(
                f"output: {self.path} is not empty; continue its run with --resume, or choose "
                "another folder with output=…"
            )


def read_log(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of a run's log that tell of a step, and how many others it has.

    Others were cut off by a kill, or are still being written. A file that is missing has no lines.
    """
    rows, bad = [], 0
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return [], 0
    for line in filter(str.strip, lines):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        else:
            bad += 1
    return rows, bad
