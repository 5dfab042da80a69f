"""Write index.json for a folder of WebDataset shards, as img2dataset and others make them."""

from __future__ import annotations

import argparse
from pathlib import Path

from vlp.data.shards import ShardIndex, index_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("folder", type=Path, help="folder that holds the *.tar files")


def run(arguments: argparse.Namespace) -> int:
    """Index the folder and say what was found; damaged shards are named and indexed so far."""
    problems = index_folder(arguments.folder)
    index = ShardIndex.open(arguments.folder)
    captions = sum(sum(entry.captions) for entry in index.shards)
    print(
        f"{arguments.folder}: {len(index.shards)} shards, {len(index)} samples, {captions} captions"
    )
    without = sum(count == 0 for entry in index.shards for count in entry.captions)
    if without:
        print(f"  {without} samples have no caption; training skips and counts them")
    for problem in problems:
        print(f"  {problem}")
    return 0
