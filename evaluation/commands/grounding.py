"""Where in an image lies what an expression means? (RefCOCO, RefCOCO+, RefCOCOg, generated corpus)

Samples need `expressions`; with `proposals` boxes are chosen among those, else the pointing game is
all there is. Any model folder will do, best one that launch/finetune_grounding.py trained.
"""

from __future__ import annotations

import argparse

from evaluation.commands.options import add_measured, add_model, load_model, measured, report
from evaluation.core.samples import EvaluationError
from evaluation.grounding.grounding import evaluate_grounding
from vlp.tasks.downstream.grounding import map_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_model(parser)
    add_measured(parser, "expressions")
    parser.add_argument(
        "--by",
        choices=("gradcam", "similarity"),
        help="Grad-CAM of a cross-attention layer, or the cosine of words and patches (default: "
        "what the model was fine-tuned and chosen by, else Grad-CAM)",
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
    parser.add_argument("--view", choices=("image", "shuffled", "blank"), default="image")


def run(options: argparse.Namespace) -> None:
    """Print and write the figures."""
    loaded = load_model(options)
    by = options.by or map_of(loaded.folder).by
    if by == "similarity" and options.layer is not None:
        raise EvaluationError(
            "--layer is of Grad-CAM, and the map is made by similarity: leave it out, or give "
            "--by gradcam"
        )
    result = evaluate_grounding(
        loaded,
        by=options.by,
        layer=options.layer,
        head=options.head,
        view=options.view,
        **measured(options),
    )
    report(result, options)
