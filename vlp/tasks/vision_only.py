"""Vision-only tasks by kind: building, saving and loading.

The `task.py` of each kind has a configuration, a `VisionTask` and
`build(config, batch, seed, precision) -> (task, training data)`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vlp.config import Config
from vlp.io import parse_json, write_json, write_tensors
from vlp.models.folder import require_sizes
from vlp.tasks.task import Precision, Task

WEIGHTS, CONFIG = "model.safetensors", "config.json"
MODEL_TYPE = "vlp-vision"


class VisionTask(Task):
    """Base of vision-only tasks."""

    config_class: ClassVar[type[Config]]

    def __init__(self, config: Any, precision: Precision = "float32") -> None:
        super().__init__(precision)
        self.config = config

    def metadata(self) -> dict[str, Any]:
        """Return JSON values from the training data that `restore` needs, such as class names."""
        return {}

    @classmethod
    def restore(cls, config: Any, metadata: Mapping[str, Any]) -> Self:
        """Create the task of a model folder with initial weights, never public ones."""
        return cls(config)

    def save_model(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write a model folder for `load_task`; `state` is the full `state_dict` of this task."""
        config = self.config.model_dump(mode="json")
        content = {"model_type": MODEL_TYPE, "task": config, "known": self.metadata()}
        write_json(folder / CONFIG, content)
        weights = {name: value.detach().cpu().clone() for name, value in state.items()}
        write_tensors(folder / WEIGHTS, weights, {"format": "pt"})


def read_task(folder: str | Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """Read the configuration, `metadata` and weights that `VisionTask.save_model` wrote."""
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} is not a model folder: {name} is missing")
    try:
        content = parse_json((folder / CONFIG).read_text(encoding="utf-8"))
        model_type = content.get("model_type") if isinstance(content, dict) else None
        if model_type != MODEL_TYPE:
            raise ValueError(f"{folder}/{CONFIG}: model_type is {model_type!r}, not {MODEL_TYPE!r}")
        return content["task"], content["known"], load_file(folder / WEIGHTS)
    except (json.JSONDecodeError, KeyError, SafetensorError) as error:
        raise ValueError(f"{folder}: {CONFIG} or {WEIGHTS} is damaged ({error!r})") from error


# Kind, a folder of `vlp.tasks` -> class in its `task.py`.
KINDS = {
    "classification": "Classification",
    "detection": "DetectionTask",
    "grids": "Grids",
    "pixels": "Pixels",
    "widgets": "Widgets",
}


def build_task(config: Any, batch: int, seed: int, precision: Precision) -> tuple[VisionTask, Any]:
    """Build the task of `config.kind` and its training data."""
    return _task_module(config.kind).build(config, batch, seed, precision)


def load_task(folder: str | Path) -> VisionTask:
    """Load a trained task in evaluation mode, on the CPU."""
    config, metadata, state = read_task(folder)
    kind = config["kind"]
    task_class: type[VisionTask] = getattr(_task_module(kind), KINDS[kind])
    restore = partial(task_class.restore, task_class.config_class.model_validate(config), metadata)
    # Absurd sizes in a foreign file would fill the memory before the weights are compared.
    require_sizes(config, restore, state, Path(folder) / CONFIG)
    task = restore()
    try:
        task.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{folder}: the weights do not fit the configuration: {error}") from error
    return task.eval()


def _task_module(kind: str) -> Any:
    if kind not in KINDS:
        raise ValueError(f"unknown kind of vision task {kind!r}; choose from {', '.join(KINDS)}")
    return import_module(f"vlp.tasks.{kind}.task")
