"""The options that every converter has."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from data_tools.executor.executor import Executor
from data_tools.executor.local import LocalExecutor
from data_tools.executor.options import add_executor, executor_of
from vlp.config import ConfigError


class BuildOptions(NamedTuple):
    """Options for building shards.

    Args:
        samples_per_shard: at most so many samples whose images are there.
        executor: reads, checks and writes.
        max_side: pixels; larger images are reduced and their boxes scaled. None: no limit.
        quality: of JPEG that must be written anew.
        licence: for the manifest.
        take_down: a text file, one key, image id or URL a line: samples to leave out.
        retry: try images again that failed before; those of an earlier shard join it, so that it
            may get more samples than that.
        replace: build every shard anew; what is there is moved aside, and goes at the end.
    """

    samples_per_shard: int = 1000
    executor: Executor = LocalExecutor()
    max_side: int | None = None
    quality: int = 90
    licence: str | None = None
    take_down: Path | None = None
    retry: bool = False
    replace: bool = False


def add_build_arguments(parser: argparse.ArgumentParser, *, images: bool = True) -> None:
    """Declare the options that every converter has; `images` False leaves `--images` out."""
    group = parser.add_argument_group("the shards")
    group.add_argument("--out", type=Path, required=True, help="folder to write into")
    if images:
        group.add_argument(
            "--images",
            type=Path,
            nargs="+",
            required=True,
            metavar="PLACE",
            help="where the images lie: folders (two levels deep), tars (also .tar.xz, .tar.gz, "
            ".tar.bz2) or zips",
        )
    group.add_argument(
        "--samples-per-shard",
        type=int,
        default=1000,
        metavar="N",
        help="at most so many samples in one tar (default 1000)",
    )
    group.add_argument(
        "--max-side",
        type=int,
        metavar="PIXELS",
        help="reduce larger images to this longest side (default: images stay as they are)",
    )
    group.add_argument(
        "--quality",
        type=int,
        default=90,
        help="of JPEG that must be written anew: turned, reduced or of another kind (default 90)",
    )
    group.add_argument(
        "--licence", "--license", help="said in manifest.json (default: the data set's own)"
    )
    group.add_argument(
        "--take-down",
        type=Path,
        metavar="FILE",
        help="leave these samples out: one key, image id or URL a line; run again with a longer "
        "list, only the shards that held one are written anew",
    )
    group.add_argument(
        "--retry",
        action="store_true",
        help="try images again that failed in an earlier run; each joins the tar that it was "
        "missing from",
    )
    group.add_argument(
        "--replace",
        action="store_true",
        help="build anew in a folder that holds other shards: those are moved to OUT/.replaced-*, "
        "and deleted when the new ones are whole (default: they are an error)",
    )
    add_executor(group, "shards that are made at the same time")


def build_options(arguments: argparse.Namespace) -> BuildOptions:
    """Return the options from the command line.

    Raises:
        ConfigError: a number is out of range, or there is no such executor.
    """
    least = {"samples_per_shard": 1, "quality": 1, "max_side": 1}
    for name, smallest in least.items():
        value = getattr(arguments, name)
        if value is not None and value < smallest:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, at least {smallest}")
    if arguments.quality > 100:
        raise ConfigError(f"--quality is {arguments.quality}, at most 100")
    given = {name: getattr(arguments, name) for name in BuildOptions._fields if name != "executor"}
    return BuildOptions(executor=executor_of(arguments), **given)
