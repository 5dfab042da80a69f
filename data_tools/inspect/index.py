"""Write index.json for a folder of WebDataset shards, as img2dataset and others make them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from tqdm import tqdm

from vlp.config import ConfigError
from vlp.data.shards.shard_index import INDEX_NAME, ShardIndex, index_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("folder", type=Path, help="folder that holds the *.tar files")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="default: one per core"
    )


def run(arguments: argparse.Namespace) -> int:
    """Index the folder and say what was found; damaged shards are named and indexed so far."""
    if arguments.processes < 1:
        raise ConfigError(f"--processes {arguments.processes}: at least one is needed")
    shown = partial(tqdm, unit="shard", disable=None)
    problems = write_index_of(arguments.folder, arguments.processes, shown)
    shards = ShardIndex.open(arguments.folder).shards
    captions, without = int(shards.captions.sum()), int(shards.uncaptioned.sum())
    print(f"{arguments.folder}: {len(shards)} shards, {shards.total} samples, {captions} captions")
    if without:
        print(f"  {without} samples have no caption; training skips and counts them")
    for problem in problems:
        print(f"  {problem}")
    return 0


def write_index_of(
    folder: Path,
    processes: int,
    progress: Callable[[Iterable[Path]], Iterable[Path]] | None = None,
) -> list[str]:
    """As `vlp.data.shards.build_index.index_folder`, for commands.

    Raises:
        ConfigError: also where the disk is full or refuses the files; an index of before stays.
    """
    try:
        return index_folder(folder, processes, progress)
    except OSError as error:
        place = error.filename or folder / INDEX_NAME
        raise ConfigError(
            f"{place}: {error.strerror}; the folder is not indexed, put that right and run again"
        ) from error
