"""The folder of a run: its files, and when it may be used."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from vlp.config import Config, ConfigError, parse_yaml
from vlp.io import parse_json, redacted_values
from vlp.process.lock import is_lock
from vlp.training.resume_check import compare


class RunFolder:
    """Places of a run's files.

    config: the resolved configuration; log: a JSON object per logged step; tensorboard: event
    files; checkpoints: folders `step_N`; model: public model folder of a finished run; best: that
    of the step that did best on the validation data, where there is one; report: summary of the
    run so far, written whenever it ends; record: its starts, the first file of a run. Where a rank
    hung, `hang` holds its ranks' stacks.

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
        self.record = self.path / "run.json"
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

    def require_run(self) -> None:
        """Require that the folder of a resumed run is a run's, or holds nothing to be lost.

        Raises:
            ConfigError: it holds something else, or cannot be read.
        """
        try:
            if not self.path.exists() or self.holds_run():
                return
            # What a start that was killed at once leaves.
            others = sorted(
                path.name
                for path in self.path.iterdir()
                if not is_lock(path) and path.suffix != ".tmp" and path != self.checkpoints
            )
        except OSError as error:
            raise ConfigError(f"output: {self.path} cannot be read ({error.strerror})") from error
        if others:
            raise ConfigError(
                f"output: {self.path} holds {', '.join(others[:4])} but no run ({self.record.name}"
                "), so nothing can be resumed there; choose another folder with output=…"
            )

    def holds_run(self) -> bool:
        """Return whether a run has been started in the folder.

        Raises:
            OSError: the folder cannot be read.
        """
        if any(path.is_dir() for path in self.checkpoints.glob("step_*")):
            return True
        return isinstance(_json(self.record).get("starts"), list)

    def require_same_run(self, config: Config) -> None:
        """Require that the folder's configuration, where there is one, is that of this run.

        Raises:
            ConfigError: what the run trains differs, or the file cannot be read.
        """
        try:
            saved = parse_yaml(self.config.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"output: {self.config} cannot be read ({error})") from error
        now = redacted_values(config.model_dump(mode="json"))
        saved = saved if isinstance(saved, dict) else {}
        if fatal := compare(saved, now, config).fatal:
            listed = "\n".join(f"  {line}" for line in fatal)
            raise ConfigError(
                f"output: {self.path} holds a run of another configuration:\n{listed}\n"
                "Restore these keys, or choose another folder with output=…"
            )

    def require_no_progress(self, place: str) -> None:
        """Require that a resumed run without checkpoints has ended with none.

        Args:
            place: where its checkpoints were looked for.

        Raises:
            ConfigError: the run that the folder holds has written some, which are not there.
        """
        try:
            report = _json(self.report)
        except OSError as error:
            raise ConfigError(f"output: {self.report} cannot be read ({error})") from error
        ended = report.get("ended")
        if self.model.exists() or ended in ("finished", "stopped"):
            raise ConfigError(
                f"{self.path} holds a run that {ended or 'finished'} at step "
                f"{report.get('step', '?')}, but {place} holds no checkpoint to resume it from: "
                "bring the checkpoints back, or choose another folder with output=…"
            )

    def finished_at(self) -> int | None:
        """Return the step of the finished model in the folder; None without one."""
        with suppress(OSError):
            report = _json(self.report)
            if report.get("ended") == "finished" and self.model.is_dir():
                return report.get("step")
        return None


def _json(file: Path) -> dict[str, Any]:
    """Return what a file of JSON holds; empty where there is none or it is none.

    Raises:
        OSError: it cannot be read.
    """
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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
