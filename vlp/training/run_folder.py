"""The folder of a run: what lies where, and when it may be used."""

from __future__ import annotations

from pathlib import Path

from vlp.config import ConfigError


class RunFolder:
    """`config.yaml`, `log.jsonl`, `tensorboard/`, `checkpoints/step_N/`, `model/`, `report.json`.

    A run that is judged while it trains has `best/` too.

    Raises:
        ConfigError: the folder holds something and the run is not resumed, or it cannot be used.
    """

    def __init__(self, path: str | Path, resume: bool) -> None:
        self.path = Path(path)
        try:
            used = self.path.exists() and any(self.path.iterdir())
        except OSError as error:
            raise ConfigError(f"output: {self.path} cannot be used ({error.strerror})") from error
        if used and not resume:
            raise ConfigError(
                f"output: {self.path} is not empty; continue its run with --resume, or choose "
                "another folder with output=…"
            )

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def log(self) -> Path:
        """One JSON object per logged step."""
        return self.path / "log.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """Folders `step_N`."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The public model folder of a finished run."""
        return self.path / "model"

    @property
    def best(self) -> Path:
        """The public model folder of the step that did best on the validation data."""
        return self.path / "best"

    @property
    def report(self) -> Path:
        """Summary of the run so far, written whenever it ends."""
        return self.path / "report.json"
