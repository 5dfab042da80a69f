"""Runs in one HTML page: figures with intervals, the paper's rows, curves, cases, anchors, maps.

A RUN is the folder of a training, a model folder, or a folder of results. Cases, anchors and maps
need --shards. The page needs no network and no other file.

  python -m evaluation report runs/plain runs/ace --shards shards/scenes/val --out report.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

from evaluation.commands.options import add_device, one_process, positive
from evaluation.core.samples import EvaluationError
from evaluation.html_report.html_report import make_report
from vlp.io import write_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, metavar="FILE.html")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the tables alone")
    parser.add_argument("--latex", type=Path, metavar="FILE", help="the tables alone, booktabs")
    parser.add_argument("--shards", nargs="+", default=(), metavar="DIR")
    parser.add_argument(
        "--cases", type=int, default=6, metavar="K", help="of each kind, best and worst (default 6)"
    )
    parser.add_argument(
        "--limit",
        type=positive,
        default=1000,
        metavar="N",
        help="retrieval cases: search the first N samples of --shards (default 1000)",
    )
    parser.add_argument(
        "--paper",
        choices=("same", "all", "none"),
        default="same",
        help="the paper's rows: where our shards are named after the same data (default), for all "
        "results of the same task, or not at all",
    )
    add_device(parser)


def run(options: argparse.Namespace) -> None:
    """Write the files that were asked for."""
    one_process("a report is made in one process, without torchrun")
    if options.out is None and options.markdown is None and options.latex is None:
        raise EvaluationError("nothing to write: give --out FILE.html, --markdown or --latex FILE")
    # Tables alone need no model.
    report = make_report(
        options.runs,
        options.shards if options.out is not None else (),
        cases=options.cases,
        limit=options.limit,
        paper=options.paper,
        device=options.device,
    )
    for path, make in (
        (options.out, report.html),
        (options.markdown, report.markdown),
        (options.latex, report.latex),
    ):
        if path is not None:
            write_text(path, make(), error=EvaluationError)
            print(path)
