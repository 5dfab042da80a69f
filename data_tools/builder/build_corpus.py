"""The way every converter of a pretraining corpus goes: parts of a corpus to folders of shards."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from data_tools.builder.options import build_options
from data_tools.builder.sample_spec import Refused, SampleSpec
from data_tools.sources.archives import unpacked
from data_tools.sources.image_sources import Originals
from vlp.config import ConfigError

Wanted = Iterable[SampleSpec | Refused]


class CorpusPart(NamedTuple):
    """One folder of shards, `OUT/NAME` (an empty name: OUT itself).

    `wanted` may be a function of the finder of images instead of the samples themselves.
    """

    name: str
    wanted: Wanted | Callable[[Originals], Wanted]
    total: int | None = None


def make_corpus(
    arguments: argparse.Namespace,
    parts: Sequence[CorpusPart],
    *,
    title: str,
    licence: str,
    settings: Mapping[str, Any] | None = None,
    originals: Callable[[Sequence[Path]], Originals] = Originals,
) -> int:
    """Build every part and print what was written and what was not.

    Args:
        arguments: with what `add_build_arguments` declares.
        parts: of the corpus.
        title: for the manifests.
        licence: for the manifests, unless the command line says another.
        settings: arguments of the command that the shards depend on, for the manifests; None:
            `--max-words` alone.
        originals: finds the images in the places.

    Returns:
        The exit code: 1 where not a single sample was written.

    Raises:
        ConfigError: a place cannot be read, or OUT not written.
    """
    build_options(arguments)  # a wrong number is told before archives are unpacked
    try:
        with unpacked(arguments.images, arguments.out) as places:
            found = originals(places)
            return build_parts(
                arguments, parts, found, title=title, licence=licence, settings=settings
            )
    except OSError as error:
        raise ConfigError(f"{error.filename or arguments.out}: {error.strerror}") from error


def build_parts(
    arguments: argparse.Namespace,
    parts: Sequence[CorpusPart],
    found: Originals,
    *,
    title: str,
    licence: str,
    settings: Mapping[str, Any] | None = None,
    accepted: Callable[[], object] = lambda: None,
) -> int:
    """Build every part from images that are found already; otherwise as `make_corpus`.

    `accepted` is called when no part can be refused any more, before a shard changes.

    Raises:
        ConfigError: a number is out of range, or OUT cannot be written.
        OSError: an image cannot be read.
    """
    # Here, so that help needs neither NumPy nor Pillow.
    from data_tools.builder.build_shards import build_in_steps
    from data_tools.builder.manifest import print_manifest

    options = build_options(arguments)
    options = options._replace(licence=options.licence or licence)
    if settings is None:
        settings = {"max_words": arguments.max_words}
    written = 0
    with ExitStack() as held:
        builds = []
        for part in parts:
            build = build_in_steps(
                part.wanted(found) if callable(part.wanted) else part.wanted,
                found,
                arguments.out / part.name,
                options,
                title=f"{title}, {part.name}" if part.name else title,
                total=part.total,
                arguments=settings,
            )
            builds.append(held.enter_context(closing(build)))
            if not options.replace:
                next(build)  # whichever part is refused, none has changed
        accepted()
        for part, build in zip(parts, builds, strict=True):
            *_, manifest = build
            print_manifest(arguments.out / part.name, manifest)
            written += manifest["samples"]
    if not written:
        print(f"{arguments.out}: no sample was written; are --images the images of this corpus?")
    return 0 if written else 1
