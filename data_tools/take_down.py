"""Take-down lists: text files with one key a line; lines that start with `#` are comments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from data_tools.scan import Shard, ShardReader, in_order
from data_tools.whole_file import whole_file


class Wanted(NamedTuple):
    """Samples of a shard whose keys are asked for."""

    shard: Shard
    numbers: Sequence[int]

    def __str__(self) -> str:
        return str(self.shard)


class Line(NamedTuple):
    """A key to take down and why."""

    folder: Path
    key: str
    reason: str


def keys_of(
    wanted: Mapping[int, Sequence[int]], shards: Sequence[Shard], processes: int
) -> Iterator[tuple[int, list[str]]]:
    """The keys of some samples, read from the headers of their shards.

    Args:
        wanted: place of the shard in `shards` -> numbers of its samples.
        shards: all shards.
        processes: that read at the same time.

    Yields:
        The place of each shard and the keys, in the order of `wanted`.
    """
    jobs = [Wanted(shards[shard], numbers) for shard, numbers in wanted.items()]
    return zip(wanted, in_order(_keys, jobs, processes))


def write_list(path: Path, heading: str, lines: Iterable[Line]) -> int:
    """Write a list whole or not at all; returns the number of keys.

    Raises:
        ConfigError: the file cannot be written.
    """
    count, folder = 0, None
    with whole_file(path) as file:
        file.write(f"# {heading}\n".encode())
        for line in lines:
            if line.folder != folder:
                folder = line.folder
                file.write(f"# of {folder}:\n".encode())
            file.write(f"# {line.reason}\n{line.key}\n".encode())
            count += 1
    return count


def _keys(wanted: Wanted) -> list[str]:
    with ShardReader(wanted.shard.path) as opened:
        return [opened.samples[number].key for number in wanted.numbers]
