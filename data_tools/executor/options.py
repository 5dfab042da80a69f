"""Options of all data tools that say where and how many tasks are done at a time."""

from __future__ import annotations

import argparse
import os

from data_tools.executor.executor import Executor
from data_tools.executor.local import LocalExecutor
from vlp.config import ConfigError


def add_executor(
    parser: argparse._ActionsContainer, what: str = "shards that are read at the same time"
) -> None:
    """Declare where the work is done, and by how many processes."""
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help=f"{what} (default: one for each core)",
    )
    parser.add_argument(
        "--executor",
        default=os.environ.get("VLP_EXECUTOR", "local"),
        metavar="WHERE",
        help="local; ray, ray://HOST:PORT (a cluster); slurm (arrays of N tasks); results are the "
        "same (default: $VLP_EXECUTOR, or local)",
    )


def executor_of(arguments: argparse.Namespace) -> Executor:
    """Return the executor that the command line asks for.

    Raises:
        ConfigError: there is none of that name, what it needs is missing, or the number of
            processes is none.
    """
    place, local = arguments.executor, LocalExecutor(arguments.processes)
    if place == "ray" or place.startswith("ray://"):
        from data_tools.executor.ray_cluster import RayExecutor

        return RayExecutor(None if place == "ray" else place, arguments.processes)
    if place == "slurm":
        from data_tools.executor.slurm import SlurmExecutor

        return SlurmExecutor(arguments.processes)
    if place != "local":
        raise ConfigError(f"--executor {place}: local, ray, ray://HOST:PORT or slurm")
    return local
