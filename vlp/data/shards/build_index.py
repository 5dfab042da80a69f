"""Construction of the index of a folder of shards by reading them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from vlp.config import ConfigError
from vlp.data.schema import captions_of
from vlp.data.shards.index import (
    INDEX_NAME,
    SurveyedShard,
    no_shards_in,
    sample_rows,
    write_index,
)
from vlp.data.shards.sample_files import BadSample, contents, parse_annotation
from vlp.data.shards.tar import Member


class Survey(NamedTuple):
    """A shard as the index wants it, the keys in it, and what is wrong behind its last sample."""

    shard: SurveyedShard
    keys: list[str]
    problem: str | None


def survey(path: Path) -> Survey:
    """Read a shard's headers and annotations; a sample that cannot be read has no captions.

    Raises:
        ConfigError: the shard cannot be opened.
    """
    found = contents(path)
    if found.missing:
        raise ConfigError(f"{path}: cannot read this shard ({found.problem})")
    captions = []
    with open(path, "rb") as file:

        def read(member: Member) -> bytes:
            file.seek(member.offset)
            return file.read(member.size)

        for sample in found.samples:
            try:
                captions.append(len(captions_of(parse_annotation(sample, read, sample.key))))
            except BadSample:
                captions.append(0)
    rows = sample_rows(found.samples, captions)
    keys = [sample.key for sample in found.samples]
    return Survey(SurveyedShard(path.name, path.stat().st_size, rows), keys, found.problem)


def index_folder(
    folder: str | Path,
    mapped: Callable[[Callable[[Path], Survey], Sequence[Path]], Iterable[Survey]] = map,
) -> list[str]:
    """Write the index of a folder of shards, whoever wrote them; the caller holds its lock.

    Args:
        folder: holds the *.tar files.
        mapped: applies a function that can be pickled to each shard, as `map` does.

    Returns:
        One line for each shard that is empty or damaged; what can be reached in it is indexed.

    Raises:
        ConfigError: there is no such folder, no shard in it, or the disk is full or refuses the
            index; one of before stays.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder of shards")
    paths = sorted(folder.glob("*.tar"))
    if not paths:
        raise ConfigError(no_shards_in(folder))
    try:
        return _write(folder, mapped(_without_keys, paths))
    except OSError as error:
        place = error.filename or folder / INDEX_NAME
        raise ConfigError(
            f"{place}: {error.strerror}; the folder is not indexed, put that right and run again"
        ) from error


def _without_keys(path: Path) -> Survey:
    return survey(path)._replace(keys=[])


def _write(folder: Path, surveys: Iterable[Survey]) -> list[str]:
    problems, shards = [], []
    for shard, _, problem in surveys:
        if problem:
            problems.append(f"{shard.name}: {problem}, {len(shard.rows)} samples before it")
        elif not len(shard.rows):
            problems.append(f"{shard.name}: empty")
        shards.append(shard)
    write_index(folder, shards)
    return problems
