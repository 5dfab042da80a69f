"""Draw some samples of a folder of shards as one image: thumbnails with their captions.

    python -m data_tools peek shards/cc3m --out sheet.png
    python -m data_tools peek shards/refcoco --out sheet.png --boxes --count 24 --seed 3
    python -m data_tools peek shards/cc3m --out sheet.png --first

Samples are drawn at random unless `--first` asks for the first ones. A damaged sample is a grey
card that names the damage. The folder needs its index.npz.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data_tools.inspect.contact_sheet import Card, draw_sheet, sample_card
from data_tools.scan.shard_reader import ShardReader, shards_of
from vlp.config import ConfigError
from vlp.data.shards.index import INDEX_NAME, ShardTable, read_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of shards")
    parser.add_argument("--out", type=Path, required=True, help="the PNG to write")
    parser.add_argument("--count", type=int, default=36, help="samples (default 36)")
    parser.add_argument("--columns", type=int, default=6, help="cards in a row (default 6)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, default=0, help="of the random choice (default 0)")
    which.add_argument("--first", action="store_true", help="the first samples instead")
    parser.add_argument("--boxes", action="store_true", help="frame the boxes of expressions")


def run(arguments: argparse.Namespace) -> int:
    """Draw the sheet; damaged samples on it are no failure."""
    for name in ("count", "columns"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} is {getattr(arguments, name)}, at least 1")
    table = read_index(arguments.folder)
    if not table.total:
        raise ConfigError(f"{arguments.folder}: its shards are empty")
    seed = None if arguments.first else arguments.seed
    chosen = choose(table, arguments.count, seed)
    cards = []
    for name, number in tqdm(chosen, unit="sample", desc="peek"):
        with ShardReader(arguments.folder / name) as shard:
            cards.append(sample_card(shard, number, arguments.boxes))
    draw_sheet(cards, arguments.out, arguments.columns)
    print(f"{arguments.out}: {len(cards)} of {table.total} samples{_damage(cards)}")
    return 0


def read_index(folder: Path) -> ShardTable:
    """Return the shards that the index of a folder names.

    Raises:
        ConfigError: there is no such folder, no shard in it, or no index that can be used.
    """
    shards_of([folder])
    path = folder / INDEX_NAME
    remedy = f"make one with: python -m data_tools index {folder}"
    try:
        with path.open("rb") as file:
            return read_table(file, str(path), remedy)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error


def choose(table: ShardTable, count: int, seed: int | None) -> list[tuple[str, int]]:
    """Choose shards and sample numbers, in order, each once; the first ones without a seed."""
    count = min(count, table.total)
    if seed is None:
        places = np.arange(count)
    else:
        places = np.sort(np.random.default_rng(seed).choice(table.total, count, replace=False))
    ends = np.cumsum(table.samples)
    shards = np.searchsorted(ends, places, side="right")
    numbers = places - (ends - table.samples)[shards]
    return [(table[shard].name, int(number)) for shard, number in zip(shards, numbers)]


def _damage(cards: list[Card]) -> str:
    damaged = sum(card.image is None for card in cards)
    return f", {damaged} of them damaged" if damaged else ""
