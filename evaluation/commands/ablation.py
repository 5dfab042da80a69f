"""Train variants of the cross-modal encoder with several seeds and print their tables."""

from __future__ import annotations

import argparse

from evaluation.ablations.ablation import AblationConfig, results, run_ablation
from evaluation.ablations.ablation_tables import report, smallest_difference
from evaluation.commands.options import add_compared, one_process
from vlp.config import load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_compared(parser)


def run(options: argparse.Namespace) -> None:
    """Train what is missing and print the tables."""
    one_process("an ablation runs side by side by itself: `jobs`, not torchrun")
    config = load_config(options.config, AblationConfig, options.overrides)
    print(smallest_difference(config))
    if not options.report:
        run_ablation(config, options.config, options.only)
    print(report(config, results(config, options.config)))
