"""Recall of images by text and of texts by image, re-ranked where asked for."""

from __future__ import annotations

import argparse

from evaluation.commands.options import add_measured, add_model, load_model, measured, report
from evaluation.core.samples import EvaluationError
from evaluation.retrieval.retrieval import evaluate_retrieval


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_model(parser)
    add_measured(parser)
    parser.add_argument(
        "--rerank", type=int, default=0, metavar="K", help="candidates the cross encoder sees"
    )
    parser.add_argument(
        "--rerank-by",
        choices=("sum", "match"),
        help="with --rerank: add the match score to the similarity (default), or let it replace it",
    )


def run(options: argparse.Namespace) -> None:
    """Print and write the recall table."""
    if options.rerank_by is not None and not options.rerank:
        raise EvaluationError("--rerank-by says how to re-rank: give --rerank K too")
    result = evaluate_retrieval(
        load_model(options),
        rerank=options.rerank,
        rerank_by=options.rerank_by or "sum",
        **measured(options),
    )
    report(result, options)
