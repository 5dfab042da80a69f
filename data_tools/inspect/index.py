"""Write index.json for a folder of WebDataset shards, as img2dataset and others make them."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from tqdm import tqdm

from data_tools.parallel import add_processes
from vlp.config import ConfigError
from vlp.data.shards.shard_index import ShardIndex, index_folder
from vlp.lock import FolderLock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("folder", type=Path, help="folder that holds the *.tar files")
    add_processes(parser)


def run(arguments: argparse.Namespace) -> int:
    """Index the folder and say what was found; 1 if shards are damaged, each indexed so far."""
    if arguments.processes < 1:
        raise ConfigError(f"--processes {arguments.processes}: at least one is needed")
    shown = partial(tqdm, unit="shard", disable=None)
    if not arguments.folder.is_dir():
        raise ConfigError(f"{arguments.folder}: there is no such folder of shards")
    with FolderLock(arguments.folder):
        problems = index_folder(arguments.folder, arguments.processes, shown)
    shards = ShardIndex.open(arguments.folder).shards
    captions, without = int(shards.captions.sum()), int(shards.uncaptioned.sum())
    print(f"{arguments.folder}: {len(shards)} shards, {shards.total} samples, {captions} captions")
    if without:
        print(f"  {without} samples have no caption; training skips and counts them")
    for problem in problems:
        print(f"  {problem}")
    return int(any(not problem.endswith(": empty") for problem in problems))
