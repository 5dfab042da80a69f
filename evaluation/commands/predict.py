"""Predictions of a model, for data that nobody has labelled too.

Shards give a file: what the benchmark's server takes (official), or one JSON object a sample
(jsonl). Image files and a text print the label, answer or caption with its probability. A folder
that was not fine-tuned for a task chooses boxes of expressions, or says whether text and image
match.

  python -m evaluation predict --model runs/vqa_v2/best --shards shards/vqa/test --out results.json
  python -m evaluation predict --model runs/vqa_v2/best --image a.jpg --text "what is on the table?"
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from evaluation.commands.options import add_model, positive
from evaluation.core.json_lines import write_lines
from evaluation.core.samples import EvaluationError, kinds_in_words
from evaluation.core.work_sharding import Ranks
from evaluation.downstream.predict import predict, write_official
from evaluation.downstream.predict_one import predict_one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_model(parser)
    parser.add_argument("--shards", nargs="+", metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="FILE", help="with --shards: what is written")
    parser.add_argument(
        "--format", choices=("official", "jsonl"), help="with --shards (default: official)"
    )
    parser.add_argument(
        "--limit",
        type=positive,
        metavar="N",
        help="with --shards: only the first N samples, expressions or questions",
    )
    parser.add_argument("--batch", type=positive, help="with --shards: items at once (default: 64)")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    parser.add_argument(
        "--image", nargs="+", action="extend", metavar="FILE", help="instead of --shards"
    )
    parser.add_argument("--text", help="with --image: question, hypothesis, statement or caption")


def run(options: argparse.Namespace) -> None:
    """Write the file, or print what is said."""
    if (options.shards is None) == (options.image is None):
        raise EvaluationError("give either --shards and --out, or --image and --text")
    if (options.shards is None) != (options.out is None):
        raise EvaluationError("--shards and --out go together")
    if options.image is not None:
        _print_one(options)
        return
    if options.text is not None:
        raise EvaluationError("--text is for --image; shards bring their own")
    if options.out.is_dir():
        raise EvaluationError(f"--out {options.out} is a folder; name a file")
    found = predict(
        options.model,
        options.shards,
        limit=options.limit,
        batch=options.batch or 64,
        device=options.device,
        precision=options.precision,
        progress=True,
    )
    if not Ranks.current().first:
        return
    if options.format != "jsonl":
        try:
            write_official(options.out, found)
        except EvaluationError as error:
            kept = options.out.with_name(f"{options.out.name}.rows.jsonl")
            write_lines(kept, found.rows)
            raise EvaluationError(f"{error}; what was predicted is in {kept}") from error
    else:
        write_lines(options.out, found.rows)
    if found.skipped:
        kinds = kinds_in_words(found.skipped)
        print(
            f"warning: not predicted: {kinds}; a server may refuse a file that lacks items",
            file=sys.stderr,
        )
    print(f"{found.kind}: {len(found.rows)} predictions written to {options.out}")


def _print_one(options: argparse.Namespace) -> None:
    for name in ("format", "limit", "batch"):
        if getattr(options, name) is not None:
            raise EvaluationError(f"--{name} is for --shards; --image gives one item")
    if Ranks.current().first:
        said = predict_one(
            options.model, options.image, options.text, options.device, options.precision
        )
        print(said.text())
