"""Search for keys that come more than once in folders of shards, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from data_tools.executor.executor import Executor
from data_tools.scan.repeated_ids import Numbers, numbers_of
from data_tools.scan.shard_reader import Shard, ShardReader, scan


def prefixed(prefix: str, name: str) -> str:
    """Put a prefix before the last part of a key or file name; folders in it stay folders."""
    folder, slash, own = name.rpartition("/")
    return f"{folder}{slash}{prefix}{own}"


def keys_in(shard: ShardReader, prefix: str = "") -> list[str]:
    """Return the keys of a shard in order."""
    return [prefixed(prefix, sample.key) for sample in shard.samples]


def repeated_keys(
    shards: Sequence[Shard],
    repeated: Numbers,
    executor: Executor,
    prefixes: Mapping[Path, str] | None = None,
) -> Iterator[tuple[Shard, str]]:
    """Yield every occurrence of the keys that come more than once, in order.

    Args:
        shards: all shards.
        repeated: numbers of keys (`repeats.number_of`) of which some come more than once.
        executor: reads the headers.
        prefixes: of the keys of each folder.
    """
    work = partial(_repeated, repeated=repeated, prefixes=prefixes or {})
    for shard, names in scan(work, shards, executor, "repeated keys"):
        for name in names:
            yield shard, name


def _repeated(shard: Shard, repeated: Numbers, prefixes: Mapping[Path, str]) -> list[str]:
    with ShardReader(shard.path) as opened:
        names = keys_in(opened, prefixes.get(shard.folder, ""))
    return [names[number] for number in np.flatnonzero(np.isin(numbers_of(names), repeated))]
