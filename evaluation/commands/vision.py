"""A model of launch/train_vision.py on its test data."""

from __future__ import annotations

import argparse
from pathlib import Path

from evaluation.commands.options import one_process
from evaluation.report import Table, write_report
from evaluation.samples import EvaluationError
from evaluation.vision import evaluate_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--model", required=True, metavar="DIR", help="the run's folder `model`")
    parser.add_argument("--device", help="default: this rank's GPU, or the CPU")
    parser.add_argument("--limit", type=int, metavar="N", help="only so many test samples")


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
    folder = write_report(Path(options.model) / "evaluation", "vision", table, figures)
    print(f"\nwritten to {folder}")
