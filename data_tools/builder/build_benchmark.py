"""The way every converter of a benchmark goes: rows to samples, images added, faults named."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from data_tools.builder.build_corpus import CorpusPart, make_corpus
from data_tools.builder.options import BuildOptions
from data_tools.builder.sample_spec import Refused, SampleSpec
from data_tools.sources.annotation_rows import Faults
from data_tools.sources.image_sources import Originals
from vlp.config import ConfigError

_COCO = re.compile(r"(?:COCO_(?:train|val|test)20\d\d_)?0*(\d{1,12})")
_OF_THE_BUILD = {*BuildOptions._fields, "out", "images"}


class Rows(NamedTuple):
    """The samples of one folder of shards.

    Args:
        wanted: the samples; they may be read as they are needed.
        faults: what is wrong with rows, complete once `wanted` is through.
        total: about how many samples there are.
        name: of the folder below OUT; empty: OUT itself.
    """

    wanted: Iterable[SampleSpec]
    faults: Faults
    total: int | None = None
    name: str = ""


def convert(
    arguments: argparse.Namespace,
    folders: Sequence[Rows],
    *,
    title: str,
    licence: str,
    originals: Callable[[Sequence[Path]], Originals] = Originals,
) -> int:
    """Build every folder of shards and print what became of the rows.

    Args:
        arguments: with what `add_build_arguments` declares.
        folders: the samples.
        title: of the data set, for the manifests.
        licence: for the manifests, unless the command line says another.
        originals: finds the images in the places.

    Returns:
        The exit code: 1 where not a single sample was written.

    Raises:
        ConfigError: a folder has no row that can be used, or a file cannot be.
    """
    parts = []
    for rows in folders:
        samples = iter(rows.wanted)
        # The first sample before any archive is unpacked: a wrong file is told at once.
        first = next(samples, None)
        if first is None:
            raise ConfigError(f"{rows.name or title}: no row can be used{_first(rows.faults)}")
        wanted = partial(_with_losses, chain([first], samples), rows.faults)
        parts.append(CorpusPart(rows.name, wanted, rows.total))
    return make_corpus(
        arguments,
        parts,
        title=title,
        licence=licence,
        settings=_settings(arguments),
        originals=originals,
    )


def key_of(identifier: str) -> str:
    """Return a key for an id: what is no letter, digit or hyphen becomes an underscore."""
    return re.sub(r"[^0-9A-Za-z-]", "_", identifier)


def image_identity(name: str, source: str) -> tuple[str, str]:
    """Return (source, image_id) of an image by its file name.

    COCO's names (`COCO_train2014_000000000009.jpg`) are recognised whatever the source, since many
    benchmarks took its images and one image has one identity; its number has no leading zeros.
    """
    stem = PurePosixPath(name).stem
    found = _COCO.fullmatch(stem)
    if found and (stem.startswith("COCO_") or source == "coco"):
        return "coco", found[1]
    return source, stem


def _with_losses(
    samples: Iterable[SampleSpec], faults: Faults, originals: Originals
) -> Iterator[SampleSpec | Refused]:
    """Yield samples, each followed by what its lost image costs, then the faults of the rows."""
    for sample in samples:
        yield sample
        if None in map(originals.find, sample.images):
            for question in sample.annotation.questions or ():
                yield Refused("question of a missing image", question.id)
            for expression in sample.annotation.expressions or ():
                yield Refused("expression of a missing image", expression.id)
    yield from faults


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the command's own arguments, files by name alone: where they lie changes no shard."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return value.name
        return [plain(one) for one in value] if isinstance(value, list) else value

    named = vars(arguments).items()
    return {name: plain(value) for name, value in named if name not in _OF_THE_BUILD}


def _first(faults: Sequence[Refused]) -> str:
    return "".join(f"; the first is of kind {one.kind!r}: {one.id}" for one in faults[:1])
