"""A model of launch/train_vision.py on its test data."""

from __future__ import annotations

import argparse

from evaluation.commands.options import add_device, one_process, positive, results_folder
from evaluation.core.results import Table, write_report
from evaluation.core.samples import EvaluationError
from evaluation.vision import evaluate_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--model", required=True, metavar="DIR", help="the run's folder `model`")
    add_device(parser)
    parser.add_argument("--limit", type=positive, metavar="N", help="only so many test samples")


def run(options: argparse.Namespace) -> None:
    """Print and write the figures."""
    one_process("vision models are evaluated in one process")
    try:
        figures = evaluate_folder(options.model, options.limit, options.device)
    except ValueError as error:
        raise EvaluationError(" ".join(str(error).split())) from error
    rows = [[name, f"{value:.2f}"] for name, value in figures.items()]
    table = Table(str(options.model), ["", "value"], rows)
    print(table.text())
    folder = write_report(results_folder(options.model), "vision", table, figures)
    print(f"\nwritten to {folder}")
