"""Parts of a data set to folders of shards: what every converter ends in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from data_tools.builder.build import build_in_steps, print_manifest
from data_tools.builder.samples import Refused, SampleSpec
from data_tools.options import BuildOptions
from data_tools.originals import Originals, unpacked
from data_tools.rows import Faults
from vlp.config import ConfigError

_COCO = re.compile(r"(?:COCO_(?:train|val|test)20\d\d_)?0*(\d{1,12})")

Wanted = Iterable[SampleSpec | Refused]


class CorpusPart(NamedTuple):
    """One folder of shards, `OUT/NAME` (an empty name: OUT itself).

    `wanted` may be a function of the finder of images instead of the samples themselves.
    """

    name: str
    wanted: Wanted | Callable[[Originals], Wanted]
    total: int | None = None


class Target(NamedTuple):
    """Shards to write: the folder of the parts, options, and for the manifests title and licence.

    `settings` are arguments that the shards depend on; a file is named without its folder, for
    where it lies changes no shard.
    """

    out: Path
    build: BuildOptions
    title: str
    licence: str
    settings: Mapping[str, Any]


def convert_rows(
    target: Target,
    images: Sequence[Path],
    wanted: Iterable[SampleSpec],
    faults: Faults,
    total: int | None = None,
) -> int:
    """Build one folder of shards of a benchmark's rows, as `make_corpus` does.

    `faults` of rows is complete once `wanted`, read as needed, is through.
    """
    part = benchmark_part("", wanted, faults, total, target.title)
    return make_corpus(target, images, [part])


def benchmark_part(
    name: str, wanted: Iterable[SampleSpec], faults: Faults, total: int | None, title: str
) -> CorpusPart:
    """Return a part whose lost images cost questions and expressions, which are counted."""
    samples = iter(wanted)
    # The first sample before any archive is unpacked: a wrong file is told at once.
    first = next(samples, None)
    if first is None:
        found = f"; the first is of kind {faults[0].kind!r}: {faults[0].id}" if faults else ""
        raise ConfigError(f"{name or title}: no row can be used{found}")
    return CorpusPart(name, partial(_with_losses, chain([first], samples), faults), total)


def make_corpus(
    target: Target,
    images: Sequence[Path],
    parts: Sequence[CorpusPart],
    originals: Callable[[Sequence[Path]], Originals] = Originals,
) -> int:
    """Build every part and print what was written and what was not; 1 where not one sample was."""
    try:
        with unpacked(images, target.out) as places:
            return build_parts(target, parts, originals(places))
    except OSError as error:
        raise ConfigError(f"{error.filename or target.out}: {error.strerror}") from error


def build_parts(
    target: Target,
    parts: Sequence[CorpusPart],
    found: Originals,
    accepted: Callable[[], object] = lambda: None,
) -> int:
    """Build every part from images that are found already; otherwise as `make_corpus`.

    `accepted` is called when no part can be refused any more, before a shard changes.
    """
    options = replace(target.build, licence=target.build.licence or target.licence)
    written = 0
    with ExitStack() as held:
        builds = []
        for part in parts:
            build = build_in_steps(
                part.wanted(found) if callable(part.wanted) else part.wanted,
                found,
                target.out / part.name,
                options,
                title=f"{target.title}, {part.name}" if part.name else target.title,
                total=part.total,
                arguments=target.settings,
            )
            builds.append(held.enter_context(closing(build)))
            if not options.replace:
                next(build)  # whichever part is refused, none has changed
        accepted()
        for part, build in zip(parts, builds, strict=True):
            *_, manifest = build
            print_manifest(target.out / part.name, manifest)
            written += manifest["samples"]
    if not written:
        print(f"{target.out}: no sample was written; are --images the images of this corpus?")
    return 0 if written else 1


def file_names(paths: Iterable[Path]) -> list[str]:
    """Return files without their folders, for `Target.settings`."""
    return [path.name for path in paths]


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
