"""Is an arrangement told from its swap? (generated corpus)"""

from __future__ import annotations

import argparse

from evaluation.commands.options import add_measured, add_model, load_model, measured, report
from evaluation.probes.winoground import evaluate_swaps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_model(parser)
    add_measured(parser, "swaps")
    parser.add_argument(
        "--view",
        choices=("image", "shuffled", "blank"),
        default="image",
        help="what the model sees: the images, their patches in random order, or nothing",
    )


def run(options: argparse.Namespace) -> None:
    """Print and write the table of swaps."""
    report(evaluate_swaps(load_model(options), view=options.view, **measured(options)), options)
