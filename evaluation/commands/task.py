"""A fine-tuned model on the data of its benchmark: figures with intervals, and predictions.

The model folder says which benchmark it is (SNLI-VE, NLVR2, VQA, captions). OUT gets KIND.json,
KIND.md and KIND.predictions.jsonl.
"""

from __future__ import annotations

import argparse

from evaluation.commands.options import add_measured, add_model, measured, report
from evaluation.core.samples import EvaluationError
from evaluation.downstream import evaluate_task
from vlp.tasks.downstream.task import Downstream, load_task


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_model(parser)
    add_measured(parser, "samples (vqa: questions)")


def run(options: argparse.Namespace) -> None:
    """Print and write the figures."""
    task = load(options.model)
    if task.kind != options.command:
        raise EvaluationError(
            f"{options.model} is fine-tuned for {task.kind}: python -m evaluation {task.kind} ..."
        )
    report(evaluate_task(task, **measured(options)), options)


def load(folder: str) -> Downstream:
    """The fine-tuned task of a folder.

    Raises:
        EvaluationError: it is damaged, or does not fit together.
    """
    try:
        return load_task(folder)
    except ValueError as error:
        raise EvaluationError(" ".join(str(error).split())) from error
