"""Several models, each on several tasks: tables of every task and a summary.

--config names them (configs/evaluation/paper.yaml). OUT/MODEL/TASK holds each result; one that is
there and whose model, options and data are the same is kept, so a call that was interrupted goes
on where it was. What fails is named, does not stop the rest, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from evaluation.commands.options import add_device
from evaluation.core.work_sharding import Ranks
from evaluation.suite.suite import run_suite
from evaluation.suite.suite_config import SuiteConfig
from vlp.config import load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--config", required=True, type=Path, metavar="FILE")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="of the results; default: the configuration's"
    )
    add_device(parser)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")


def run(options: argparse.Namespace) -> int:
    """Judge what is missing and print the tables; 1 where something failed."""
    config = load_config(options.config, SuiteConfig, options.overrides)
    out = options.out or Path(config.output)
    result = run_suite(config, out, options.device, progress=True)
    if Ranks.current().first:
        result.save(out)
        for table in result.tables():
            print(f"\n{table.text()}")
        print(f"\nwritten to {out}")
        for (model, label), error in result.failures.items():
            print(f"failed: {model}/{label}: {error}", file=sys.stderr)
    return 1 if result.failures else 0
