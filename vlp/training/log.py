"""Logs of a run: JSON lines, trackers, and a progress bar."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from vlp.io import redacted, unfollowed, write_text
from vlp.training.run_folder import RunFolder, flatten, read_log
from vlp.training.trackers import Tracker, TrackerName

_VALIDATION = "validation/"


class _StandardError:
    """The stream of that name, which may lose its reader (`| tee`) while the run goes on."""

    def write(self, text: str) -> None:
        with suppress(BrokenPipeError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(BrokenPipeError):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


class RunLog:
    """Writes on rank 0; on other ranks every method does nothing.

    Args:
        folder: the run's folder, or None on other ranks.
        step: steps already done; lines of later steps, left by a run that was killed after its
            last checkpoint, are removed.
        total: steps of the whole run.
        trackers: where figures go beside; they are closed with the log. One that fails is left out
            from then on, but for TensorBoard, whose files lie beside the log.
        looked: the last step that was validated; lines of later validations are removed, which
            come again.

    `last` is the last record of training that an earlier start wrote, on rank 0.
    """

    def __init__(
        self,
        folder: RunFolder | None,
        step: int,
        total: int,
        trackers: Mapping[TrackerName, Tracker] | None = None,
        looked: int = 0,
    ) -> None:
        self._folder, self._trackers = folder, dict(trackers or {})
        self.last: dict[str, Any] = {}
        if folder is None:
            return
        earlier = _drop_later(folder.log, step, looked)
        self.last = next((line for line in reversed(earlier) if "samples" in line), {})
        self._file = open(folder.log, "a", encoding="utf-8", opener=unfollowed)  # noqa: SIM115
        # A bar that is redrawn in a file or in CI output is noise.
        interval = 0.1 if sys.stderr.isatty() else 10.0
        self._screen = _StandardError()
        self._bar = tqdm(
            total=total, initial=step, unit="step", mininterval=interval, file=self._screen
        )

    def advance(self) -> None:
        """Count a step."""
        if self._folder is not None:
            self._bar.update()

    def write(self, record: Mapping[str, Any]) -> None:
        """Log one step: `step`, and numbers by name (nested ones as `outer/inner`)."""
        if self._folder is None:
            return
        flat = flatten(record)
        self._file.write(json.dumps(flat) + "\n")
        self._file.flush()
        step = flat.pop("step")
        self._track(flat, step)
        shown = {"loss": "loss/total", "samples/s": "samples_per_second", "lr": "learning_rate"}
        self._bar.set_postfix(
            {
                label: f"{flat[name]:.4g}"
                for label, name in shown.items()
                if flat.get(name) is not None
            },
            refresh=False,
        )

    def validated(self, step: int, figures: Mapping[str, float]) -> None:
        """Log and print the metrics of a validation after a step."""
        if self._folder is None:
            return
        named = {f"{_VALIDATION}{name}": value for name, value in figures.items()}
        self._file.write(json.dumps(flatten({"step": step, **named})) + "\n")
        self._file.flush()
        self._track(named, step)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        self.say(f"step {step}, validation: {shown}")

    def _track(self, figures: Mapping[str, Any], step: int) -> None:
        numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
        self._each(lambda tracker: tracker.log(numbers, step))

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:
                if name == "tensorboard":
                    raise
                del self._trackers[name]
                self.say(redacted(f"{name} gets no more figures: {error}"))

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        if self._folder is not None:
            self._bar.write(message, file=self._screen)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._folder is not None:
            self._each(lambda tracker: tracker.close(kind is not None))
            self._bar.close()
            self._file.close()


def _drop_later(path: Path, step: int, looked: int) -> list[dict[str, Any]]:
    """Keep the lines up to a step, and those of validations up to another; returns them."""
    if not path.exists():
        return []

    def is_earlier(record: dict[str, Any]) -> bool:
        validated = any(name.startswith(_VALIDATION) for name in record)
        return bool(record["step"] <= (looked if validated else step))

    kept = [record for record in read_log(path)[0] if is_earlier(record)]
    write_text(path, "".join(json.dumps(record) + "\n" for record in kept))
    return kept
