"""Does a word find its object? (generated corpus, COCO)"""

from __future__ import annotations

import argparse

from evaluation.commands.options import add_measured, add_model, load_model, measured, report
from evaluation.probes.pointing import evaluate_pointing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_model(parser)
    add_measured(parser)


def run(options: argparse.Namespace) -> None:
    """Print and write the pointing table."""
    report(evaluate_pointing(load_model(options), **measured(options)), options)
