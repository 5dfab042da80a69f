"""Registry of the evaluations of downstream tasks, by kind, with lazy imports.

A built-in task is evaluated by this package's module of the same name as in `vlp.tasks.downstream`.
Other packages call `register_evaluation` where they register the task.
"""

from __future__ import annotations

from importlib import import_module

from evaluation.downstream.task_evaluation import PageAction, TaskEvaluation
from vlp.tasks.downstream.registry import get_task, task_kinds, task_module

_registered: dict[str, TaskEvaluation] = {}


def register_evaluation(evaluation: TaskEvaluation) -> None:
    """Register an evaluation under its kind; it replaces an earlier evaluation of the kind."""
    _registered[evaluation.kind] = evaluation


def get_evaluation(kind: str) -> TaskEvaluation:
    """Return the evaluation of a kind, importing its module on first use."""
    if kind not in _registered and task_module(kind):
        import_module(f"evaluation.downstream.{task_module(kind)}")
    # Importing a plugin's task registers its evaluation, too; an unknown kind is an error.
    if kind not in _registered:
        get_task(kind)
    if kind not in _registered:
        raise ValueError(f"no evaluation is registered for tasks {kind!r}")
    return _registered[kind]


def page_actions() -> dict[PageAction, list[str]]:
    """Return the page's actions that need a fine-tuned model, with the kinds of task that serve."""
    actions: dict[PageAction, list[str]] = {}
    for kind in task_kinds():
        if action := get_evaluation(kind).action:
            actions.setdefault(action, []).append(kind)
    return actions
