"""Draw what each position encoding tells of an image's patches."""

from __future__ import annotations

import argparse
from pathlib import Path

from evaluation.core.samples import EvaluationError
from evaluation.core.work_sharding import Ranks
from evaluation.probes.position_maps import draw_position_maps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png")


def run(options: argparse.Namespace) -> None:
    """Draw the image."""
    if options.out.suffix.lower() != ".png":
        raise EvaluationError(f"--out {options.out}: the image is a .png file")
    if Ranks.current().first:
        print(draw_position_maps(options.out))
