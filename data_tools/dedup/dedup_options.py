"""Options of the commands that compare images: what counts as the same, and what is kept."""

from __future__ import annotations

import argparse
from pathlib import Path

from data_tools.dedup.perceptual_hash import DISTANCE
from vlp.config import ConfigError


def add_near_duplicate_options(parser: argparse.ArgumentParser) -> None:
    """Declare what counts as the same image, where hashes are kept, and the sheet of pairs."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--exact", action="store_true", help="the same bytes only")
    which.add_argument(
        "--distance",
        type=int,
        default=DISTANCE,
        metavar="BITS",
        help=f"of 64 in which alike images may differ, 0 to 16 (default {DISTANCE})",
    )
    parser.add_argument(
        "--hashes", type=Path, metavar="FOLDER", help="keep hashes here (default: LIST.hashes)"
    )
    parser.add_argument("--sheet", type=Path, metavar="PNG", help="draw pairs side by side")
    parser.add_argument(
        "--pairs", type=int, default=24, metavar="N", help="pairs on the sheet (default 24)"
    )


def required_distance(arguments: argparse.Namespace) -> int | None:
    """Return `--distance`, None for `--exact`; ConfigError if it is not 0 to 16."""
    if not 0 <= arguments.distance <= 16:
        raise ConfigError(f"--distance is {arguments.distance}, 0 to 16 bits are possible")
    return None if arguments.exact else arguments.distance


def hash_folder(arguments: argparse.Namespace) -> Path:
    """Return the folder that hashes are kept in."""
    folder: Path = arguments.hashes or arguments.out.with_name(arguments.out.name + ".hashes")
    return folder
