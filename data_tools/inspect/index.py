"""Write index.npz for a folder of WebDataset shards, as img2dataset and others make them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tqdm import tqdm

from data_tools.executor.executor import Executor, open_ledger
from data_tools.executor.options import add_executor, executor_of
from vlp.config import ConfigError
from vlp.data.shards.build_index import Survey, index_folder
from vlp.data.shards.shard_index import ShardIndex
from vlp.lock import FolderLock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("folder", type=Path, help="folder that holds the *.tar files")
    add_executor(parser)


def run(arguments: argparse.Namespace) -> int:
    """Index the folder and say what was found; 1 if shards are damaged, each indexed so far."""
    executor = executor_of(arguments)
    if not arguments.folder.is_dir():
        raise ConfigError(f"{arguments.folder}: there is no such folder of shards")
    with FolderLock(arguments.folder), open_ledger(arguments.folder / ".index.tasks") as ledger:
        problems = index_folder(arguments.folder, partial(_shown, executor, ledger))
    shards = ShardIndex.open(arguments.folder).shards
    captions, without = int(shards.captions.sum()), int(shards.uncaptioned.sum())
    print(f"{arguments.folder}: {len(shards)} shards, {shards.total} samples, {captions} captions")
    if without:
        print(f"  {without} samples have no caption; a pretraining skips and counts them")
    for problem in problems:
        print(f"  {problem}")
    return int(any(not problem.endswith(": empty") for problem in problems))


def _shown(
    executor: Executor,
    ledger: Path,
    work: Callable[[Path], Survey],
    shards: Sequence[Path],
) -> Iterator[Survey]:
    surveys = executor.map(work, shards, ledger=ledger)
    yield from tqdm(surveys, total=len(shards), unit="shard", disable=None)
