"""Runs of the command under test on one tiny configuration."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

STEPS, CHECKPOINT_EVERY = 12, 4


@dataclass
class Lab:
    """A configuration on disk, and runs of it."""

    folder: Path
    config: Path

    def output(self, name: str) -> Path:
        return self.folder / name

    def arguments(self, name: str, *more: str) -> list[str]:
        return ["--config", str(self.config), f"output={self.output(name)}", *more]

    def zero(self, stage: int) -> str:
        """A ZeRO file; stage 3 cuts up every parameter, however small."""
        path = self.folder / f"zero{stage}.json"
        values: dict[str, Any] = {"stage": stage}
        if stage == 3:
            values["stage3_param_persistence_threshold"] = 0
        path.write_text(json.dumps({"zero_optimization": values}))
        return f"training.engine={path}"

    def log(self, name: str) -> list[dict[str, Any]]:
        lines = (self.output(name) / "log.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def report(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.output(name) / "report.json").read_text())
        return found

    def saved_steps(self, name: str) -> list[int]:
        """Steps of a run's checkpoints."""
        folders = (self.output(name) / "checkpoints").glob("step_*[0-9]")
        return sorted(int(folder.name.removeprefix("step_")) for folder in folders)

    def begin_with(self, source: str, step: int, name: str) -> None:
        """Begin a run with the checkpoint that another one wrote."""
        folder = f"checkpoints/step_{step}"
        shutil.copytree(self.output(source) / folder, self.output(name) / folder)

    def weights(self, name: str, step: int) -> dict[str, Tensor]:
        """Weights of a checkpoint."""
        return load_file(self.output(name) / f"checkpoints/step_{step}/weights.safetensors")
