"""`python -m evaluation retrieval | pointing | anchors`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import vlp
from evaluation.anchors import anchor_maps
from evaluation.pictures import draw_anchor_maps
from evaluation.pointing import evaluate_pointing
from evaluation.ranks import Ranks, process_group
from evaluation.retrieval import evaluate_retrieval
from evaluation.samples import EvaluationError
from vlp.config import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one evaluation; errors in what was asked for end with code 2 and one line."""
    options = _parser().parse_args(arguments)
    with process_group() as ranks:
        try:
            options.run(options, ranks)
        except (ConfigError, EvaluationError, FileNotFoundError) as error:
            if ranks.first:
                print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


def _retrieval(options: argparse.Namespace, ranks: Ranks) -> None:
    result = evaluate_retrieval(
        vlp.load(options.model),
        options.shards,
        rerank=options.rerank,
        rerank_by=options.rerank_by,
        limit=options.limit,
        batch=options.batch,
        device=options.device,
        precision=options.precision,
        progress=True,
    )
    _report(result, options, ranks)


def _pointing(options: argparse.Namespace, ranks: Ranks) -> None:
    result = evaluate_pointing(
        vlp.load(options.model),
        options.shards,
        limit=options.limit,
        batch=options.batch,
        device=options.device,
        precision=options.precision,
        progress=True,
    )
    _report(result, options, ranks)


def _anchors(options: argparse.Namespace, ranks: Ranks) -> None:
    if not ranks.first:
        return
    maps = anchor_maps(
        vlp.load(options.model), options.shards, count=options.count, device=options.device
    )
    print(draw_anchor_maps(maps, options.out))


def _report(result: object, options: argparse.Namespace, ranks: Ranks) -> None:
    if not ranks.first:
        return
    print(result.table().text())  # type: ignore[attr-defined]
    folder = options.out or Path(options.model) / "evaluation"
    print(f"\nwritten to {result.save(folder)}")  # type: ignore[attr-defined]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation",
        description="Evaluate a model folder; torchrun shares the work.",
    )
    tasks = parser.add_subparsers(required=True, metavar="TASK")

    retrieval = tasks.add_parser("retrieval", help="recall in both directions")
    _common(retrieval)
    _measured(retrieval)
    retrieval.add_argument(
        "--rerank", type=int, default=0, metavar="K", help="candidates the cross encoder sees"
    )
    retrieval.add_argument(
        "--rerank-by",
        choices=("sum", "match"),
        default="sum",
        help="add the match score to the similarity (default), or let it replace it",
    )
    retrieval.set_defaults(run=_retrieval)

    pointing = tasks.add_parser("pointing", help="does a word find its object (generated corpus)")
    _common(pointing)
    _measured(pointing)
    pointing.set_defaults(run=_pointing)

    anchors = tasks.add_parser("anchors", help="draw where the anchors of each word lie")
    _common(anchors)
    anchors.add_argument("--count", type=int, default=4, help="captions, one of each picture")
    anchors.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    anchors.set_defaults(run=_anchors)
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="model folder or hub name")
    parser.add_argument("--shards", required=True, nargs="+", metavar="DIR")
    parser.add_argument("--device", help="default: this rank's GPU, or the CPU")


def _measured(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N samples")
    parser.add_argument("--batch", type=int, default=64, help="pictures of one encoder call")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="for JSON and Markdown; default MODEL/evaluation"
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main())
