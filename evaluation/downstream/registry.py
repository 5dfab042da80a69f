"""Registry of the evaluations of downstream tasks, by kind.

The evaluation of a built-in task is in the module of this package that has the name of the task's
own in `vlp.tasks.downstream`; it is imported when first asked for. Another package calls
`register_evaluation` in the module that registers its task. Which kinds there are is known to
`vlp.tasks.downstream.registry.task_kinds`, which imports nothing heavy.
"""

from __future__ import annotations

from importlib import import_module

from evaluation.downstream.task_evaluation import PageAction, TaskEvaluation
from vlp.tasks.downstream.registry import get_task, task_kinds, task_module

WITHOUT_HEAD = "grounding"
"""Kind whose predictions a model folder without a task gives."""

_registered: dict[str, TaskEvaluation] = {}


def register_evaluation(evaluation: TaskEvaluation) -> None:
    """Make an evaluation known under its kind; a second one of the kind replaces the first."""
    _registered[evaluation.kind] = evaluation


def get_evaluation(kind: str) -> TaskEvaluation:
    """Return the evaluation of a kind, importing its module on first use."""
    if kind not in _registered and task_module(kind):
        import_module(f"evaluation.downstream.{task_module(kind)}")
    if kind not in _registered:
        get_task(kind)
    if kind not in _registered:
        raise ValueError(f"no evaluation is registered for tasks {kind!r}")
    return _registered[kind]


def page_actions() -> dict[PageAction, list[str]]:
    """Return what a page can do with fine-tuned models, each with the kinds that it needs."""
    actions: dict[PageAction, list[str]] = {}
    for kind in task_kinds():
        if action := get_evaluation(kind).action:
            actions.setdefault(action, []).append(kind)
    return actions
