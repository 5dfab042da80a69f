"""Shards from sample specs and source images: the common back end of all converters.

A shard's bytes depend on its piece of the list alone, so pieces are built in parallel, a killed
build resumes with the missing ones, and a take-down changes one shard.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from operator import length_hint
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import PIL
from PIL import features
from tqdm import tqdm

from data_tools.builder.samples import Refused, SampleSpec, TakeDown
from data_tools.builder.write_shard import (
    JOURNAL_NAME,
    Journal,
    Pieces,
    Record,
    make_shard,
    temporary,
)
from data_tools.options import BuildOptions
from data_tools.originals import Originals, unpacked
from data_tools.rows import Faults
from vlp.config import ConfigError
from vlp.data.limits import limits
from vlp.data.shards.index import TABLE_GLOB
from vlp.data.shards.shard_reader import INDEX_NAME, ShardIndex, index_folder
from vlp.io import atomic_write, parse_json, sync_path, write_text
from vlp.lock import FolderLock

_ASIDE = ".replaced-*"

BUILD_VERSION = 1  # raised whenever equal inputs give other shards


def build_in_steps(
    wanted: Iterable[SampleSpec | Refused],
    originals: Originals,
    out: Path,
    options: BuildOptions,
    *,
    title: str,
    total: int | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Generator[dict[str, Any], None, None]:
    """Write the shards, their index and `OUT/manifest.json` in two steps; samples there stay.

    A list without an existing sample, or of another data set, is an error without
    `options.replace`. `arguments` are the command's that the shards depend on. Yields an empty
    manifest when the folder is locked and the list accepted, before any change; then that of
    `make_manifest`.
    """
    settings = {
        "version": BUILD_VERSION,
        "samples_per_shard": options.samples_per_shard,
        "max_side": options.max_side,
        "quality": options.quality,
    }
    about = {**settings, **(arguments or {})}
    begun = json.loads(json.dumps({"data_set": title, **about}))
    take_down = TakeDown.read(options.take_down, out)
    total = total or length_hint(wanted) or None
    try:
        with ExitStack() as held:
            held.enter_context(FolderLock(out))
            if options.replace:
                _set_aside(out, begun)
            journal = held.enter_context(Journal(out, begun))
            held.enter_context(_swept(out))
            pieces = Pieces(originals, journal, options, take_down)
            jobs = pieces.jobs(wanted)
            first = list(islice(jobs, 1))
            yield {}
            there = pieces.kept  # before now, so that it is no part of the rate
            with tqdm(
                total=total, desc=str(out), unit=" samples", smoothing=0.05, initial=there
            ) as bar:
                results = options.workers().map(make_shard, chain(first, jobs), ordered=False)
                for record, process in results:
                    _publish(journal, record, process)
                    bar.update(record.wanted)
                bar.update(pieces.kept - there)
            journal.finish(pieces.shards)
            manifest = make_manifest(pieces, title, about)
            _write_index(out, manifest)
            write_manifest(out / MANIFEST_NAME, manifest)
            if options.replace and manifest["samples"]:
                for aside in out.glob(_ASIDE):
                    shutil.rmtree(aside)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or out}: cannot be written ({error.strerror}); finished shards stay, "
            "run the same command again to go on"
        ) from error
    yield manifest


def _set_aside(out: Path, begun: Mapping[str, Any]) -> None:
    """Move a build's output into a folder of its own, once for all runs of a command."""
    done, number = "replaced_by.json", len(list(out.glob(_ASIDE)))
    if number:
        last = out / _ASIDE.replace("*", f"{number - 1:03d}")
        if not (last / done).exists():
            number -= 1  # a run was killed while it moved
        elif parse_json((last / done).read_bytes()) == begun:
            return
    aside = out / _ASIDE.replace("*", f"{number:03d}")
    aside.mkdir(exist_ok=True)
    beside = [out / name for name in (JOURNAL_NAME, MANIFEST_NAME, INDEX_NAME)]
    for path in (*out.glob("*.tar"), *out.glob(TABLE_GLOB), *beside):
        if path.exists():
            path.rename(aside / path.name)
    write_text(aside / done, json.dumps(begun))


def _publish(journal: Journal, record: Record, process: int) -> None:
    written = temporary(journal.folder, record.number, process)
    place = journal.folder / record.name
    # It knows the shards of before, and sizes alone would not tell: tars are filled up to 10 KiB.
    (journal.folder / INDEX_NAME).unlink(missing_ok=True)
    journal.add(record)
    if record.samples:
        written.rename(place)
    else:
        written.unlink()
        place.unlink(missing_ok=True)
    sync_path(journal.folder)


@contextmanager
def _swept(out: Path) -> Iterator[None]:
    """Remove unfinished shards of a killed run before, and of this one after."""
    try:
        _sweep(out)
        yield
    finally:
        _sweep(out)


def _sweep(out: Path) -> None:
    for leftover in out.glob("shard-[0-9]*.tar.[0-9]*.tmp"):
        leftover.unlink(missing_ok=True)


def _write_index(out: Path, manifest: Mapping[str, Any]) -> None:
    """Index the folder, unless no shard changed: a survey reads every shard."""
    shards = [(shard["name"], shard["samples"], shard["bytes"]) for shard in manifest["shards"]]
    if not shards:
        (out / INDEX_NAME).unlink(missing_ok=True)
        return
    try:
        index = ShardIndex.open(out)
        if [(entry.name, entry.samples, entry.bytes) for entry in index.shards] == shards:
            return
    except ConfigError:
        pass
    index_folder(out)


MANIFEST_NAME = "manifest.json"


def make_manifest(pieces: Pieces, title: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of a finished build; equal shards and failures give equal ones."""
    records = [pieces.journal.records[number] for number in range(pieces.shards)]
    failures = {kind: list(ids) for kind, ids in pieces.refused.items()}
    for record in records:
        for kind, ids in record.failures.items():
            failures.setdefault(kind, []).extend(ids)
        if record.taken_down:
            failures.setdefault("taken down", []).extend(record.taken_down)
    unmet = sorted(pieces.take_down.lines - pieces.take_down.met)
    return {
        "title": title,
        "licence": pieces.options.licence,
        "arguments": {**arguments, "limits": limits().model_dump()},
        "samples": sum(record.samples for record in records),
        "captions": sum(record.captions for record in records),
        "bytes": sum(record.bytes for record in records),
        "shards": [
            {
                "name": record.name,
                "samples": record.samples,
                "bytes": record.bytes,
                "sha256": record.sha256,
            }
            for record in records
            if record.samples
        ],
        "failures": {
            kind: {"count": len(ids), "ids": ids} for kind, ids in sorted(failures.items())
        },
        "take_down_without_a_sample": unmet,
        "problems": pieces.originals.problems,
        "versions": {
            "pillow": PIL.__version__,
            "libjpeg_turbo": features.version("libjpeg_turbo"),
        },
    }


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write it whole or not at all."""
    with atomic_write(path, "w", durable=True) as file:
        json.dump(manifest, file, indent=1, ensure_ascii=False)
        file.write("\n")


def print_manifest(out: Path, manifest: Mapping[str, Any]) -> None:
    """Print numbers of written and failed samples, and the file that names the failures."""
    print(
        f"{out}: {manifest['samples']} samples, {manifest['captions']} captions in "
        f"{len(manifest['shards'])} shards, {manifest['bytes'] / 1e6:.1f} MB"
    )
    for kind, failed in manifest["failures"].items():
        print(f"  {kind}: {failed['count']} (first: {failed['ids'][0]})")
    unmet = manifest["take_down_without_a_sample"]
    if unmet:
        print(f"  take-down lines that name no sample here: {len(unmet)} (first: {unmet[0]})")
    for problem in manifest["problems"]:
        print(f"  damaged: {problem}")
    if manifest["failures"]:
        print(f"  {out / MANIFEST_NAME} names every one of them")


_COCO = re.compile(r"(?:COCO_(?:train|val|test)20\d\d_)?0*(\d{1,12})")

Wanted = Iterable[SampleSpec | Refused]


class CorpusPart(NamedTuple):
    """One folder of shards, `OUT/NAME` or OUT; `wanted` may be a function of the image finder."""

    name: str
    wanted: Wanted | Callable[[Originals], Wanted]
    total: int | None = None


class Target(NamedTuple):
    """Output folder, build options, title and licence of shards.

    `settings` are arguments that the shards depend on, with file names but no folders.
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
    """Build one folder of shards as `make_corpus` does; `faults` fills while `wanted` is read."""
    part = benchmark_part("", wanted, faults, total, target.title)
    return make_corpus(target, images, [part])


def benchmark_part(
    name: str, wanted: Iterable[SampleSpec], faults: Faults, total: int | None, title: str
) -> CorpusPart:
    """Return a part that counts the questions and expressions of lost images."""
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
    """Build every part and print its results; returns 1 without a single sample."""
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
    """Build every part from found images; `accepted` is called before the first shard changes."""
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
    """Return a key for an id, with `_` for anything but letters, digits and hyphens."""
    return re.sub(r"[^0-9A-Za-z-]", "_", identifier)


def stems_of(names: Iterable[str]) -> dict[str, str]:
    """Return each image's stem, or its path (perhaps with extension) if several share the stem."""
    forms: tuple[Callable[[str], str], ...] = (
        lambda name: PurePosixPath(name).stem,
        lambda name: str(PurePosixPath(name).parent / PurePosixPath(name).stem),
        str,
    )
    rest = list(dict.fromkeys(names))
    stems: dict[str, str] = {}
    for form in forms:
        by_key: dict[str, list[str]] = defaultdict(list)
        for name in rest:
            by_key[key_of(form(name))].append(name)
        stems |= {same[0]: form(same[0]) for same in by_key.values() if len(same) == 1}
        rest = [name for name in rest if name not in stems]
    return {**dict(zip(rest, rest)), **stems}


def image_identity(name: str, source: str, own: str | None = None) -> tuple[str, str]:
    """Return (source, image_id) of an image by its file name.

    COCO's names (`COCO_train2014_000000000009.jpg`) are recognised in any source, so that an image
    of several benchmarks has one identity. Others have `own` (of `stems_of`) or their stem.
    """
    stem = PurePosixPath(name).stem
    if own not in (None, stem):
        return source, str(own)
    found = _COCO.fullmatch(stem)
    if found and (stem.startswith("COCO_") or source == "coco"):
        return "coco", found[1]
    return source, stem


def _with_losses(
    samples: Iterable[SampleSpec], faults: Faults, originals: Originals
) -> Iterator[SampleSpec | Refused]:
    """Yield samples, each followed by the losses of its image, then the faults of the rows."""
    for sample in samples:
        yield sample
        if None in map(originals.find, sample.images):
            for question in sample.annotation.questions or ():
                yield Refused("question of a missing image", question.id)
            for expression in sample.annotation.expressions or ():
                yield Refused("expression of a missing image", expression.id)
    yield from faults
