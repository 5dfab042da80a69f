"""Where in a picture lies what an expression means? (RefCOCO, RefCOCO+, RefCOCOg, generated corpus)

Samples need `expressions`; with `proposals` boxes are chosen among those, else the pointing game is
all there is. Any model folder will do, best one that launch/finetune_grounding.py trained.
"""

from __future__ import annotations

import argparse

from evaluation.commands.options import add_measured, add_model, load_model, measured, report
from evaluation.grounding import evaluate_grounding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_model(parser)
    add_measured(parser)
    parser.add_argument(
        "--by",
        choices=("gradcam", "similarity"),
        default="gradcam",
        help="Grad-CAM of a cross-attention layer (default), or the cosine of words and patches",
    )
    parser.add_argument(
        "--layer", type=int, metavar="L", help="of Grad-CAM, from 0 (default: the middle one)"
    )
    parser.add_argument(
        "--head",
        type=int,
        metavar="N",
        help="an expression's first N word pieces make its map: in English what is meant comes "
        "first (default: all)",
    )
    parser.add_argument("--view", choices=("picture", "shuffled", "blank"), default="picture")


def run(options: argparse.Namespace) -> None:
    """Print and write the figures."""
    result = evaluate_grounding(
        load_model(options),
        by=options.by,
        layer=options.layer,
        head=options.head,
        view=options.view,
        **measured(options),
    )
    report(result, options)
