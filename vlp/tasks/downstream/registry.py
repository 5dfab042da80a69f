"""Registry of downstream tasks.

A new task is at most four files:

1. `vlp/tasks/MINE/task.py` with the task's configuration (`kind: Literal["mine"]`), its
   `Downstream` and `build`, which calls `register_task`;
2. `evaluation/downstream/MINE.py` with its `TaskEvaluation` (see
   `evaluation.downstream.task_evaluation`);
3. a line in `BUILT_IN`, or in another package an entry point of the group `vlp.tasks`, which names
   the module that registers task and evaluation;
4. a configuration file of its fine-tuning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from vlp.config import load_plugins

if TYPE_CHECKING:
    from vlp.tasks.downstream.task import TaskConfig

# Kind -> (folder of `vlp.tasks` and module of `evaluation.downstream`, summary). `get_task` imports
# a module on first use, so that the command line starts without PyTorch.
BUILT_IN = {
    "retrieval": ("retrieval", "image-text retrieval (Flickr30K, COCO)"),
    "snli_ve": ("pair_classification", "visual entailment (SNLI-VE)"),
    "nlvr2": ("pair_classification", "statements about images (NLVR2, NLVR v1)"),
    "nlvr2_assignment": ("pair_classification", "text assignment, which prepares for NLVR2"),
    "vqa": ("vqa", "visual question answering (VQA v2)"),
    "caption": ("caption", "image captioning (COCO)"),
    "grounding": ("grounding", "weakly supervised visual grounding (RefCOCO, RefCOCO+, RefCOCOg)"),
}

ENTRY_POINTS = "vlp.tasks"


@dataclass(frozen=True)
class TaskCard:
    """Facts about a kind of task for model cards."""

    # Ending of "a model for ...".
    purpose: str
    # Pipeline tag of the hub.
    pipeline: str | None = None
    # Number of images of one item.
    images: int = 1
    # Whether the model reads a text.
    text: bool = True
    # Whether its benchmark has a submission format.
    official: bool = True


@dataclass(frozen=True)
class DownstreamTask:
    """One kind of downstream task."""

    # Its name in configurations, commands and results.
    kind: str
    config: type[TaskConfig]
    # (config, parts, batch, seed, precision) -> (task, training data)
    build: Callable[..., tuple[Any, Any]]
    # `Downstream.restore`; None for a task without a head.
    restore: Callable[..., Any] | None
    card: TaskCard


_registered: dict[str, DownstreamTask] = {}


def register_task(task: DownstreamTask) -> None:
    """Register a task under its kind; a second one of the same kind replaces the first."""
    _registered[task.kind] = task


def task_kinds() -> tuple[str, ...]:
    """Return the kinds of all tasks: built-in, of installed packages and of plugins."""
    load_plugins()
    return tuple(dict.fromkeys((*BUILT_IN, *_entry_points(), *_registered)))


def task_summary(kind: str) -> str:
    """Return a phrase that describes a kind of task in `--help`; ValueError if unknown."""
    if kind in BUILT_IN:
        return BUILT_IN[kind][1]
    return get_task(kind).card.purpose


def get_task(kind: str) -> DownstreamTask:
    """Return the task of a kind, importing its module on first use; ValueError if unknown."""
    if kind not in _registered:
        if kind not in BUILT_IN:
            load_plugins()
        if kind in BUILT_IN:
            import_module(f"vlp.tasks.{BUILT_IN[kind][0]}.task")
        elif kind in _entry_points():
            import_module(_entry_points()[kind])
    if kind not in _registered:
        raise ValueError(f"unknown kind of task {kind!r}; choose from {', '.join(task_kinds())}")
    return _registered[kind]


def task_module(kind: str) -> str:
    """Return the folder in `vlp.tasks` of a built-in task, "" for any other."""
    return BUILT_IN[kind][0] if kind in BUILT_IN else ""


@cache
def _entry_points() -> dict[str, str]:
    return {point.name: point.module for point in entry_points(group=ENTRY_POINTS)}
