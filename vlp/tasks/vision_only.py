"""Vision-only tasks by kind: what trains them, and what loads them again.

Each kind is a module of this package with a configuration, a task and
`build(config, batch, seed, precision) -> (task, data)` and `load(config, known) -> task`.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vlp.config import Config
from vlp.io import parse_json, write_json, write_tensors
from vlp.tasks.task import PlainTask, Precision

WEIGHTS, CONFIG = "model.safetensors", "config.json"
MODEL_TYPE = "vlp-vision"


def save_task(
    folder: Path, config: Config, state: dict[str, Tensor], known: dict[str, Any] | None = None
) -> None:
    """Write a folder that `load_task` reads.

    Args:
        state: full weights and buffers of the task, by name.
        known: what the data told when it was opened, such as class names; plain JSON values.
    """
    plain = {"model_type": MODEL_TYPE, "task": config.model_dump(mode="json"), "known": known or {}}
    write_json(folder / CONFIG, plain)
    weights = {name: value.detach().cpu().clone() for name, value in state.items()}
    write_tensors(folder / WEIGHTS, weights, {"format": "pt"})


def read_task(folder: str | Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """The task's configuration, what the data told, and the weights, as `save_task` had them."""
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


KINDS = ("classification", "detection", "grids", "pixels", "widgets")


def build_task(config: Any, batch: int, seed: int, precision: Precision) -> tuple[PlainTask, Any]:
    """The task of `config.kind` and its training data."""
    built: tuple[PlainTask, Any] = _module(config.kind).build(config, batch, seed, precision)
    return built


def load_task(folder: str | Path) -> PlainTask:
    """A trained task in evaluation mode, on the CPU."""
    config, known, state = read_task(folder)
    task: PlainTask = _module(config["kind"]).load(config, known)
    try:
        task.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{folder}: the weights do not fit the configuration: {error}") from error
    return task.eval()


def untrained_task(folder: str | Path, seed: int) -> PlainTask:
    """The task of a folder as a training with this seed began, but for public weights.

    It is in evaluation mode, on the CPU.
    """
    config, known, _ = read_task(folder)
    torch.manual_seed(seed)
    task: PlainTask = _module(config["kind"]).load(config, known)
    return task.eval()


def _module(kind: str) -> Any:
    if kind not in KINDS:
        raise ValueError(f"unknown kind of task {kind!r}; there are {', '.join(KINDS)}")
    return import_module(f"vlp.tasks.{kind}.task")
