"""Features of images and captions: images.npy, captions.npy and a line of JSON for each row.

Rows have unit length and come in the order of the shards; numpy.load(..., mmap_mode="r") reads them
without holding them. Of single inputs the features are printed as lines of JSON, or written with
--out.

  python -m evaluation embed --model runs/base/model --shards shards/coco/val --out features/coco
  python -m evaluation embed --model runs/base/model --text "a red circle" --image a.jpg
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from evaluation.commands.options import add_model, load_model, positive
from evaluation.core.feature_files import FeatureFiles
from evaluation.core.samples import EvaluationError, kinds_in_words
from evaluation.core.work_sharding import Ranks
from evaluation.retrieval.embed import CAPTIONS, IMAGES, embed, embed_inputs
from vlp.models.folder import Loaded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_model(parser)
    parser.add_argument("--shards", nargs="+", metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to be made")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N samples")
    parser.add_argument("--batch", type=positive, default=64, help="images of one encoder call")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    parser.add_argument(
        "--image",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="instead of --shards",
    )
    parser.add_argument("--text", nargs="+", action="extend", default=[], metavar="TEXT")


def run(options: argparse.Namespace) -> None:
    """Write the files, or print the features."""
    single = bool(options.image or options.text)
    if single == (options.shards is not None):
        raise EvaluationError("give either --shards and --out, or --image and --text")
    if not single and options.out is None:
        raise EvaluationError("--shards needs --out, the folder to be made")
    loaded = load_model(options)
    if single:
        if Ranks.current().first:
            _single(loaded, options)
        return
    found = embed(
        loaded,
        options.shards,
        options.out,
        dtype=options.dtype,
        limit=options.limit,
        batch=options.batch,
        device=options.device,
        precision=options.precision,
        progress=True,
    )
    if not Ranks.current().first:
        return
    if found.skipped:
        kinds = kinds_in_words(found.skipped)
        print(f"warning: skipped: {kinds}", file=sys.stderr)
    print(f"{found.images} images and {found.captions} captions written to {options.out}")


def _single(loaded: Loaded, options: argparse.Namespace) -> None:
    found = embed_inputs(loaded, options.image, options.text, options.device, options.precision)
    if options.out is None:
        for what, feature in found:
            print(json.dumps({**what, "feature": feature.tolist()}, ensure_ascii=False))
        return
    names = {"image": IMAGES, "text": CAPTIONS}
    kinds = [kind for kind in names if any(kind in what for what, _ in found)]
    width = loaded.model.config.embed_dim
    files = FeatureFiles(
        options.out, [names[kind] for kind in kinds], width, options.dtype, Ranks(0, 1)
    )
    for kind in kinds:
        own = [(what, feature) for what, feature in found if kind in what]
        rows = np.stack([feature for _, feature in own])
        files.add(names[kind], rows, [what for what, _ in own])
    files.finish()
    print(f"{len(found)} features written to {options.out}")
