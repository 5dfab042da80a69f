"""Vision-only tasks by kind: training and loading.

Each kind is a folder with a `task.py`, which has a configuration, a `VisionTask`, and
`build(config, batch, seed, precision) -> (task, data)`.
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
from vlp.tasks.task import PlainTask, Precision

WEIGHTS, CONFIG = "model.safetensors", "config.json"
MODEL_TYPE = "vlp-vision"


class VisionTask(PlainTask):
    """Base of vision-only tasks; a subclass names its configuration's class."""

    config_class: ClassVar[type[Config]]

    def __init__(self, config: Any, precision: Precision = "float32") -> None:
        super().__init__(precision)
        self.config = config

    def metadata(self) -> dict[str, Any]:
        """Return JSON values that came from the data, such as class names, for `restore`."""
        return {}

    @classmethod
    def restore(cls, config: Any, metadata: Mapping[str, Any]) -> Self:
        """Make the task that a model folder describes, with fresh weights."""
        return cls(config)

    def save_model(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write a folder that `load_task` reads, from the task's full weights and buffers."""
        config = self.config.model_dump(mode="json")
        plain = {"model_type": MODEL_TYPE, "task": config, "known": self.metadata()}
        write_json(folder / CONFIG, plain)
        weights = {name: value.detach().cpu().clone() for name, value in state.items()}
        write_tensors(folder / WEIGHTS, weights, {"format": "pt"})


def read_task(folder: str | Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """Read configuration, `metadata` and weights, as `VisionTask.save_model` wrote them."""
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} is not a model folder: {name} is missing")
    try:
        plain = parse_json((folder / CONFIG).read_text(encoding="utf-8"))
        if plain.get("model_type") != MODEL_TYPE:
            raise ValueError(f"{folder} holds no vision task but {plain.get('model_type')!r}")
        return plain["task"], plain["known"], load_file(folder / WEIGHTS)
    except (json.JSONDecodeError, KeyError, SafetensorError) as error:
        raise ValueError(f"{folder}: damaged ({error})") from error


# Classes of the tasks by kind, imported on first use.
KINDS = {
    "classification": "Classification",
    "detection": "DetectionTask",
    "grids": "Grids",
    "pixels": "Pixels",
    "widgets": "Widgets",
}


def build_task(config: Any, batch: int, seed: int, precision: Precision) -> tuple[VisionTask, Any]:
    """Make the task of `config.kind` and its training data."""
    built: tuple[VisionTask, Any] = _module(config.kind).build(config, batch, seed, precision)
    return built


def load_task(folder: str | Path) -> VisionTask:
    """Load a trained task in evaluation mode, on the CPU."""
    config, metadata, state = read_task(folder)
    kind: type[VisionTask] = getattr(_module(config["kind"]), KINDS[config["kind"]])
    make = partial(kind.restore, kind.config_class.model_validate(config), metadata)
    require_sizes(config, make, state, Path(folder) / CONFIG)
    task = make()
    try:
        task.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{folder}: the weights do not fit the configuration: {error}") from error
    return task.eval()


def _module(kind: str) -> Any:
    if kind not in KINDS:
        raise ValueError(f"unknown kind of task {kind!r}; there are {', '.join(KINDS)}")
    return import_module(f"vlp.tasks.{kind}.task")
