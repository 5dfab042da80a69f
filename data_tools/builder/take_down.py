"""Take-down lists: one key, image id or URL a line, and comments. Written and honoured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from data_tools.executor.executor import Executor
from data_tools.scan.shard_reader import Shard, ShardReader
from vlp.config import ConfigError
from vlp.data.schema import Annotation
from vlp.io import atomic_write

_COMMENT = re.compile(r"^#(?:\s|$)|\s#")


class SamplesToRemove(NamedTuple):
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


class TakeDown:
    """Take-down list, and those of its lines that were met so far (`met`)."""

    def __init__(self, lines: frozenset[str] = frozenset()) -> None:
        self.lines = lines
        self.met: set[str] = set()

    @classmethod
    def read(cls, path: Path | None) -> TakeDown:
        """Read the list; empty lines and comments do not count.

        A comment is `# ` at the start of a line, or `#` behind white space, with what follows: keys
        and URLs may hold and start with a `#`.

        Raises:
            ConfigError: it cannot be read.
        """
        if path is None:
            return cls()
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: the take-down list cannot be read ({error})") from error
        lines = (_COMMENT.split(line)[0].strip() for line in text.splitlines())
        return cls(frozenset(line for line in lines if line))

    def names(self, key: str, annotation: Annotation) -> bool:
        """Return whether a line names this sample: by key, `image_id` or `url`."""
        if not self.lines:
            return False
        url = (annotation.model_extra or {}).get("url")
        said = self.lines.intersection(
            name for name in (key, annotation.image_id, url) if isinstance(name, str)
        )
        self.met |= said
        return bool(said)


def keys_of(
    wanted: Mapping[int, Sequence[int]], shards: Sequence[Shard], executor: Executor
) -> Iterator[tuple[int, list[str]]]:
    """Return the keys of some samples, read from the headers of their shards.

    Args:
        wanted: place of the shard in `shards` -> numbers of its samples.
        shards: all shards.
        executor: reads the headers.

    Yields:
        The place of each shard and the keys, in the order of `wanted`.
    """
    jobs = [SamplesToRemove(shards[shard], numbers) for shard, numbers in wanted.items()]
    return zip(wanted, executor.map(_keys, jobs))


def write_list(path: Path, heading: str, lines: Iterable[Line]) -> int:
    """Write a list whole or not at all; returns the number of keys.

    Raises:
        ConfigError: the file cannot be written.
    """
    count, folder = 0, None
    with atomic_write(path, error=ConfigError) as file:
        file.write(f"# {heading}\n".encode())
        for line in lines:
            if line.folder != folder:
                folder = line.folder
                file.write(f"# of {folder}:\n".encode())
            file.write(f"# {line.reason}\n{line.key}\n".encode())
            count += 1
    return count


def warn_of_shared_keys(shared: int) -> None:
    """Print a warning where keys of a list are also those of so many samples that are kept."""
    if shared:
        print(
            f"  careful: {shared} samples that are kept have the same key as a dropped one of "
            "another folder; use the part of the list under '# of FOLDER' for each folder alone"
        )


def _keys(wanted: SamplesToRemove) -> list[str]:
    with ShardReader(wanted.shard.path) as opened:
        return [opened.samples[number].key for number in wanted.numbers]
