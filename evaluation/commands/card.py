"""Write the model card (README.md) of a model folder, as the hub wants it.

It holds the configuration, the parameters, what the run trained on (where the folder lies in its
run) and the tables in the folder's `evaluation`. A card that was written by hand is left alone.
"""

from __future__ import annotations

import argparse

from evaluation.core.samples import EvaluationError
from evaluation.core.work_sharding import Ranks
from vlp.models.folder import local_folder
from vlp.tasks.model_card import CARD, write_model_card


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--model", required=True, metavar="DIR", help="model folder")
    parser.add_argument("--licence", metavar="NAME", help="of the weights, such as apache-2.0")


def run(options: argparse.Namespace) -> None:
    """Write the card."""
    if not Ranks.current().first:
        return
    folder = local_folder(options.model)
    try:
        written = write_model_card(folder, options.licence)
    except ValueError as error:
        raise EvaluationError(" ".join(str(error).split())) from error
    if not written:
        raise EvaluationError(f"{folder / CARD} was written by hand; remove it to have one made")
    print(f"written to {folder / CARD}")
