"""Tasks of ARC as their authors store them: one JSON file each, pairs of small coloured grids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vlp.config import ConfigError
from vlp.data.shards.tar import stored_files
from vlp.io import parse_json

Grid = np.ndarray
"""(rows, columns) int64, colours 0 to 9; at most 30 of either."""

COLOURS = 10
LARGEST = 30


class GridPair(NamedTuple):
    """Input grid and output grid of an example."""

    input: Grid
    output: Grid


class ArcTask(NamedTuple):
    """One rule, shown by `train` pairs and asked for by `test` pairs."""

    name: str
    train: tuple[GridPair, ...]
    test: tuple[GridPair, ...]


def read_tasks(path: str, names: Sequence[str]) -> dict[str, ArcTask]:
    """Return the named tasks, in that order.

    Args:
        path: a folder, in which files are looked for at every depth, or a tar file of one.
        names: file names without `.json`, such as 67a3c6ac.

    Raises:
        ConfigError: nothing is there, a name is missing or there twice, or its file is no task.
    """
    wanted, contents = set(names), {}
    for name, where, content in _files(path):
        if name not in wanted:
            continue
        if name in contents:
            raise ConfigError(f"{path}: task {name} is there twice, the second time as {where}")
        contents[name] = _parse(name, where, content)
    if missing := [name for name in names if name not in contents]:
        raise ConfigError(f"{path}: there are no tasks {', '.join(missing)}")
    return {name: contents[name] for name in names}


def _files(path: str) -> Iterator[tuple[str, str, bytes]]:
    place = Path(path)
    if place.is_dir():
        for file in sorted(place.rglob("*.json")):
            yield file.stem, str(file), file.read_bytes()
        return
    if not place.is_file():
        raise ConfigError(f"{path}: there is neither a folder nor a tar file of ARC tasks")
    for name, content in stored_files(place, lambda name: name.suffix == ".json"):
        yield name.stem, f"{path}, {name}", content


def _parse(name: str, where: str, content: bytes) -> ArcTask:
    try:
        plain = parse_json(content)
        train, test = (
            tuple(_pair(pair, f"{part} {number}") for number, pair in enumerate(plain[part]))
            for part in ("train", "test")
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: no ARC task ({error})") from error
    if not train or not test:
        raise ConfigError(f"{where}: {len(train)} train and {len(test)} test pairs")
    return ArcTask(name, train, test)


def _pair(plain: Any, where: str) -> GridPair:
    return GridPair(
        _grid(plain["input"], f"{where} input"), _grid(plain["output"], f"{where} output")
    )


def _grid(plain: Any, where: str) -> Grid:
    grid = np.array(plain)  # rows of different length are refused here
    if (
        grid.ndim != 2
        or grid.dtype.kind != "i"
        or not 0 < min(grid.shape) <= max(grid.shape) <= LARGEST
    ):
        raise ValueError(
            f"{where}: a grid has 1 to {LARGEST} rows of as many numbers, not {grid.dtype} "
            f"{grid.shape}"
        )
    if not ((grid >= 0) & (grid < COLOURS)).all():
        raise ValueError(f"{where}: colours are 0 to 9, not {grid.min()} to {grid.max()}")
    return grid.astype(np.int64)
