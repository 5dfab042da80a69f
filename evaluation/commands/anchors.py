"""Draw where the anchors of each word lie.

An image file and a text give a grid of everything: anchors, Grad-CAM and the path of each channel
group, and its arrays as .npz. Shards give an overview of several captions, or with --detail a grid
of each.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from evaluation.commands.options import add_model, load_model
from evaluation.core.samples import EvaluationError
from evaluation.core.work_sharding import Ranks
from evaluation.probes.anchor_maps import anchor_details, anchor_maps, first_samples, read_pair
from evaluation.probes.anchor_plots import draw_anchor_detail, draw_anchor_maps

CAPTIONS, GROUPS = 4, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_model(parser)
    parser.add_argument("--image", type=Path, metavar="FILE", help="an image, with --text")
    parser.add_argument("--text", help="what to look for in --image")
    parser.add_argument("--shards", nargs="+", metavar="DIR", help="instead of --image and --text")
    parser.add_argument(
        "--count",
        type=int,
        metavar="K",
        help=f"captions from --shards, one of each image (default {CAPTIONS}, or 1 in detail)",
    )
    parser.add_argument("--detail", action="store_true", help="the grid, for --shards too")
    parser.add_argument(
        "--layer",
        type=int,
        metavar="L",
        help="cross-modal layer of Grad-CAM, from 0, or negative from the end (default: the middle "
        "one; in the last, only the whole caption has a map)",
    )
    parser.add_argument(
        "--groups", type=int, metavar="G", help=f"groups drawn at most (default {GROUPS})"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png")


def run(options: argparse.Namespace) -> None:
    """Draw the grids, or the overview."""
    _check(options)
    if not Ranks.current().first:
        return
    if options.image is None and not options.detail:
        count = CAPTIONS if options.count is None else options.count
        maps = anchor_maps(load_model(options), options.shards, count=count, device=options.device)
        print(draw_anchor_maps(maps, options.out))
        return
    if options.image is not None:
        samples = [read_pair(options.image, options.text)]
    else:
        samples = first_samples(options.shards, 1 if options.count is None else options.count)
    loaded = load_model(options)
    details = anchor_details(loaded, samples, layer=options.layer, device=options.device)
    for number, detail in enumerate(details):
        out = options.out
        if len(details) > 1:
            out = out.with_stem(f"{out.stem}-{number}")
        print(draw_anchor_detail(detail, out, GROUPS if options.groups is None else options.groups))
        print(detail.save(out.with_suffix(".npz")))


def _check(options: argparse.Namespace) -> None:
    """Raises EvaluationError for options that do not go together."""
    if (options.image is None) == (options.shards is None):
        raise EvaluationError("give either --image and --text, or --shards")
    if (options.image is None) != (options.text is None):
        raise EvaluationError("--image and --text go together")
    if options.image is not None and options.count is not None:
        raise EvaluationError("--count is for --shards; --image is one image")
    if options.image is None and not options.detail:
        for name in ("layer", "groups"):
            if getattr(options, name) is not None:
                raise EvaluationError(f"--{name} is for the grid: add --detail")
    if options.groups is not None and options.groups < 1:
        raise EvaluationError(f"--groups {options.groups}: at least one group is drawn")
    if options.out.suffix.lower() != ".png":
        raise EvaluationError(f"--out {options.out}: the image is a .png file")
