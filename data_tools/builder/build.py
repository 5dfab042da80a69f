"""Shards from sample specs and source images: the common back end of all converters."""

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
    require_own_shards,
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
# Raised whenever equal inputs give other shards.
BUILD_VERSION = 1


def build_in_steps(
    specs: Iterable[SampleSpec | Refused],
    originals: Originals,
    out: Path,
    options: BuildOptions,
    *,
    title: str,
    total: int | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Generator[dict[str, Any], None, None]:
    """Write the shards, their index and `OUT/manifest.json` in two steps; earlier shards are kept.

    Yields {} once `specs` fit the shards in `out`, before any is written, then the manifest.
    `arguments` are the command-line arguments on which the shards depend.
    """
    settings = {
        "version": BUILD_VERSION,
        "samples_per_shard": options.samples_per_shard,
        "max_side": options.max_side,
        "quality": options.quality,
    }
    manifest_arguments = {**settings, **(arguments or {})}
    build_settings = json.loads(json.dumps({"data_set": title, **manifest_arguments}))
    take_down = TakeDown.read(options.take_down, out)
    total = total or length_hint(specs) or None
    try:
        with ExitStack() as stack:
            stack.enter_context(FolderLock(out))
            if options.replace:
                _set_aside(out, build_settings)
            journal = stack.enter_context(Journal(out, build_settings))
            stack.enter_context(_without_leftovers(out))
            pieces = Pieces(originals, journal, options, take_down)
            jobs = pieces.jobs(specs)
            # The first job comes only after the list was checked against the existing shards.
            first = list(islice(jobs, 1))
            yield {}
            # Shards of an earlier run do not count for the bar's speed.
            initial = pieces.unchanged
            with tqdm(
                total=total, desc=str(out), unit=" samples", smoothing=0.05, initial=initial
            ) as bar:
                # A shard's bytes depend on its piece of the list alone, so any order will do.
                results = options.workers().map(make_shard, chain(first, jobs), ordered=False)
                for record, process in results:
                    _publish(journal, record, process)
                    bar.update(record.wanted)
                bar.update(pieces.unchanged - initial)
            journal.finish(pieces.shards)
            manifest = make_manifest(pieces, title, manifest_arguments)
            _write_index(out, manifest)
            write_manifest(out / MANIFEST_NAME, manifest)
            # Delete the replaced shards only after a complete build that is not empty.
            if options.replace and manifest["samples"]:
                for aside in out.glob(_ASIDE):
                    shutil.rmtree(aside)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or out}: cannot be written ({error.strerror}); finished shards stay, "
            "run the same command again to go on"
        ) from error
    yield manifest


def _set_aside(out: Path, build_settings: Mapping[str, Any]) -> None:
    """Move a build's output into a folder of its own, once for all runs of a command.

    Raises ConfigError at tars that no build wrote, before anything is moved.
    """
    done, number = "replaced_by.json", len(list(out.glob(_ASIDE)))
    if number:
        last = out / _ASIDE.replace("*", f"{number - 1:03d}")
        if not (last / done).exists():
            # A run was killed while it moved.
            number -= 1
        elif parse_json((last / done).read_bytes()) == build_settings:
            return
    has_build = number > 0 or (out / JOURNAL_NAME).exists()
    require_own_shards(out, has_build)
    if not has_build:
        return
    aside = out / _ASIDE.replace("*", f"{number:03d}")
    aside.mkdir(exist_ok=True)
    bookkeeping = [out / name for name in (JOURNAL_NAME, MANIFEST_NAME, INDEX_NAME)]
    for path in (*out.glob("*.tar"), *out.glob(TABLE_GLOB), *bookkeeping):
        if path.exists():
            path.rename(aside / path.name)
    write_text(aside / done, json.dumps(build_settings))


def _publish(journal: Journal, record: Record, process: int) -> None:
    temporary_path = temporary(journal.folder, record.number, process)
    path = journal.folder / record.name
    # It knows the shards of before, and sizes alone would not tell: tars are filled up to 10 KiB.
    (journal.folder / INDEX_NAME).unlink(missing_ok=True)
    journal.add(record)
    if record.samples:
        temporary_path.rename(path)
    else:
        temporary_path.unlink()
        path.unlink(missing_ok=True)
    sync_path(journal.folder)


@contextmanager
def _without_leftovers(out: Path) -> Iterator[None]:
    # A killed run leaves unfinished shards behind, and so does a failure of this one.
    try:
        _sweep(out)
        yield
    finally:
        _sweep(out)


def _sweep(out: Path) -> None:
    for leftover in out.glob("shard-[0-9]*.tar.[0-9]*.tmp"):
        leftover.unlink(missing_ok=True)


def _write_index(out: Path, manifest: Mapping[str, Any]) -> None:
    # A survey reads every shard, so the index stays where no shard changed.
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
    unmatched = sorted(pieces.take_down.lines - pieces.take_down.matched)
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
        "take_down_without_a_sample": unmatched,
        "problems": pieces.originals.problems,
        "versions": {"pillow": PIL.__version__, "libjpeg_turbo": features.version("libjpeg_turbo")},
    }


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest atomically."""
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
    keys = manifest["take_down_without_a_sample"]
    if keys:
        print(f"  take-down lines that name no sample here: {len(keys)} (first: {keys[0]})")
    for problem in manifest["problems"]:
        print(f"  damaged: {problem}")
    if manifest["failures"]:
        print(f"  {out / MANIFEST_NAME} names every one of them")


_COCO = re.compile(r"(?:COCO_(?:train|val|test)20\d\d_)?0*(\d{1,12})")
Specs = Iterable[SampleSpec | Refused]


class CorpusPart(NamedTuple):
    """One folder of shards, `OUT/NAME` or OUT; `specs` may be a function of the image finder."""

    name: str
    specs: Specs | Callable[[Originals], Specs]
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
    samples: Iterable[SampleSpec],
    faults: Faults,
    total: int | None = None,
) -> int:
    """Build one folder of shards as `make_corpus` does; `faults` fills while `samples` is read."""
    part = benchmark_part("", samples, faults, total, target.title)
    return make_corpus(target, images, [part])


def benchmark_part(
    name: str, samples: Iterable[SampleSpec], faults: Faults, total: int | None, title: str
) -> CorpusPart:
    """Return a part that counts the questions and expressions of lost images."""
    specs = iter(samples)
    # Before any archive is unpacked, which takes minutes: a wrong file is an error at once.
    first = next(specs, None)
    if first is None:
        detail = f"; the first is of kind {faults[0].kind!r}: {faults[0].id}" if faults else ""
        raise ConfigError(f"{name or title}: no row can be used{detail}")
    return CorpusPart(name, partial(_with_refusals, chain([first], specs), faults), total)


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
    originals: Originals,
    accepted: Callable[[], object] = lambda: None,
) -> int:
    """Build every part from found images; `accepted` is called before the first shard changes."""
    options = replace(target.build, licence=target.build.licence or target.licence)
    written = 0
    with ExitStack() as stack:
        builds = []
        for part in parts:
            build = build_in_steps(
                part.specs(originals) if callable(part.specs) else part.specs,
                originals,
                target.out / part.name,
                options,
                title=f"{target.title}, {part.name}" if part.name else target.title,
                total=part.total,
                arguments=target.settings,
            )
            builds.append(stack.enter_context(closing(build)))
            # Whichever part is refused, none has changed.
            if not options.replace:
                next(build)
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


def check_splits(splits: Sequence[str] | None, available: Sequence[str]) -> None:
    """Refuse splits of the command line that a data set does not have."""
    if unknown := sorted(set(splits or ()) - set(available)):
        raise ConfigError(f"--splits: there is no {unknown[0]!r}, only {', '.join(available)}")


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


def image_identity(name: str, source: str, unique_stem: str | None = None) -> tuple[str, str]:
    """Return (source, image_id) by file name; the id is `unique_stem` or its stem."""
    stem = PurePosixPath(name).stem
    if unique_stem not in (None, stem):
        return source, str(unique_stem)
    # COCO's names count in any source, so that an image of several benchmarks has one identity.
    match = _COCO.fullmatch(stem)
    if match and (stem.startswith("COCO_") or source == "coco"):
        return "coco", match[1]
    return source, stem


def _with_refusals(
    samples: Iterable[SampleSpec], faults: Faults, originals: Originals
) -> Iterator[SampleSpec | Refused]:
    """Yield samples, of missing images a Refused per question and expression, then `faults`."""
    for sample in samples:
        yield sample
        if None in map(originals.find, sample.images):
            for question in sample.annotation.questions or ():
                yield Refused("question of a missing image", question.id)
            for expression in sample.annotation.expressions or ():
                yield Refused("expression of a missing image", expression.id)
    yield from faults
