"""Zero-shot classification: the class whose prompts lie nearest to an image.

--shards takes shard folders, whose samples name their class as `label`, folders of class folders,
and tar files of such. --classes has a class name a line, or what the data calls the class, a tab
and the name. --templates has a prompt a line, such as "a photo of a {}."; the features of a class's
prompts are averaged.

  python -m evaluation zeroshot --model runs/base/model --shards cifar10/test.tar.xz --classes c.txt
"""

from __future__ import annotations

import argparse
from pathlib import Path

from evaluation.commands.options import add_measured, add_model, load_model, measured, report
from evaluation.core.samples import EvaluationError
from evaluation.zeroshot.labelled_images import LABEL
from evaluation.zeroshot.prompts import read_prompts
from evaluation.zeroshot.zeroshot import evaluate_zeroshot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_model(parser)
    add_measured(parser)
    parser.add_argument("--classes", required=True, type=Path, metavar="FILE")
    parser.add_argument("--templates", type=Path, metavar="FILE", help="default: a photo of a {}.")
    parser.add_argument(
        "--label-field", default=LABEL, metavar="NAME", help="of the JSON in shards (label)"
    )
    parser.add_argument(
        "--match",
        type=int,
        nargs="?",
        const=5,
        default=0,
        metavar="K",
        help="the cross-modal encoder scores the best K classes again (5 unless said)",
    )
    parser.add_argument(
        "--match-by",
        choices=("sum", "match"),
        help="with --match: add its score to the similarity (default), or let it replace it",
    )


def run(options: argparse.Namespace) -> None:
    """Print and write the figures."""
    if options.match_by is not None and not options.match:
        raise EvaluationError("--match-by says how classes are scored again: give --match too")
    result = evaluate_zeroshot(
        load_model(options),
        prompts=read_prompts(options.classes, options.templates),
        label_field=options.label_field,
        match=options.match,
        match_by=options.match_by or "sum",
        **measured(options),
    )
    report(result, options)
