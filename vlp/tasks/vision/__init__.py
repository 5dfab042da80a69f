"""Vision-only tasks by kind: what trains them, and what loads them again.

Each kind is a module of this package with a configuration, a task and
`build(config, batch, seed, precision) -> (task, data)` and `load(config, known) -> task`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from vlp.tasks.plain import PlainTask, Precision
from vlp.tasks.vision.folder import read_task

KINDS = ("classification", "detection", "grids", "pixels", "widgets")


def build_task(config: Any, batch: int, seed: int, precision: Precision) -> tuple[PlainTask, Any]:
    """The task of `config.kind` and its training data.

    Raises:
        ConfigError: they do not fit.
    """
    built: tuple[PlainTask, Any] = _module(config.kind).build(config, batch, seed, precision)
    return built


def load_task(folder: str | Path) -> PlainTask:
    """A trained task in evaluation mode, on the CPU.

    Raises:
        FileNotFoundError: a file of the folder is missing.
        ValueError: it is no vision task's folder, or its weights do not fit.
    """
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

    Raises:
        FileNotFoundError: a file of the folder is missing.
        ValueError: it is no vision task's folder.
    """
    config, known, _ = read_task(folder)
    torch.manual_seed(seed)
    task: PlainTask = _module(config["kind"]).load(config, known)
    return task.eval()


def _module(kind: str) -> Any:
    if kind not in KINDS:
        raise ValueError(f"unknown kind of task {kind!r}; there are {', '.join(KINDS)}")
    return import_module(f"vlp.tasks.vision.{kind}")
