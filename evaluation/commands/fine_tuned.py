"""Commands that measure a fine-tuned model: `vlp evaluate TASK`, one for each kind of task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer
from typer import Option

from evaluation.commands.options import checked, measurement
from vlp.tasks.downstream.registry import task_summary
from vlp.tasks.vqa.metrics import Version


def command_of(kind: str) -> Callable[..., Any]:
    """Return the function behind the command of a kind of task."""
    if kind == "vqa":
        return vqa

    def evaluate(model: str, **measured: Any) -> Any:
        return _evaluated(kind, model, **measured)

    summary = task_summary(kind)
    evaluate.__doc__ = (
        f"{summary[0].upper()}{summary[1:]}.\n\n"
        f"Evaluates a fine-tuned model. Figures have intervals. OUT gets {kind}.json, {kind}.md "
        f"and {kind}.predictions.jsonl."
    )
    return measurement()(evaluate)


@measurement("questions")
def vqa(
    model: str,
    predict: Annotated[
        Literal["rank", "generate"] | None,
        Option(help="choose from the list of answers, or write freely (default: as fine-tuned)"),
    ] = None,
    version: Annotated[
        Version | None,
        Option(
            help="the current official evaluator, or ALBEF's older one (default: as fine-tuned)"
        ),
    ] = None,
    **measured: Any,
) -> Any:
    """Visual question answering.

    Evaluates a fine-tuned model. Figures have intervals. OUT gets vqa.json, vqa.md and
    vqa.predictions.jsonl.
    """
    return _evaluated("vqa", model, predict=predict, version=version, **measured)


def _evaluated(kind: str, model: str, **measured: Any) -> Any:
    from evaluation.downstream import evaluate_task
    from vlp.tasks.downstream.task import load_task

    task = checked(lambda: load_task(model))
    if task.kind != kind:
        raise typer.BadParameter(
            f"{model} is fine-tuned for {task.kind}: python -m evaluation {task.kind} ..."
        )
    return evaluate_task(task, **measured)
