"""Two results of the same task on the same items: differences with intervals and tests.

A and B are files KIND.predictions.jsonl, folders that hold them, or model folders that were
evaluated. The difference is B minus A.

  python -m evaluation compare runs/plain/best runs/ace/best --task vqa
"""

from __future__ import annotations

import argparse
from pathlib import Path

from evaluation.core.work_sharding import Ranks
from evaluation.suite.compare import compare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("first", metavar="A")
    parser.add_argument("second", metavar="B")
    parser.add_argument("--task", help="which, where the folders hold results of several")
    parser.add_argument("--permutations", type=int, default=10_000, help="of the sign-flip test")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for JSON and Markdown too")


def run(options: argparse.Namespace) -> None:
    """Print the table, and write it where asked for."""
    if not Ranks.current().first:
        return
    result = compare(options.first, options.second, options.task, permutations=options.permutations)
    print(result.table().text())
    if options.out is not None:
        print(f"\nwritten to {result.save(options.out)}")
