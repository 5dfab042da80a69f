"""Shards from sample specs and source images: the common back end of all converters."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from operator import length_hint
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import PIL
from PIL import features
from tqdm import tqdm

from data_tools.builder.samples import Fault, SampleSpec, TakeDown
from data_tools.builder.write_shard import (
    JOURNAL_NAME,
    BuildPlan,
    Journal,
    Record,
    make_shard,
    require_build_shards,
)
from data_tools.options import BuildOptions
from data_tools.originals import Originals, unpack_archives
from data_tools.rows import Faults
from vlp.config import ConfigError
from vlp.data.limits import limits
from vlp.data.shards.index import TABLE_GLOB
from vlp.data.shards.shard_reader import INDEX_NAME, ShardIndex, index_folder
from vlp.io import parse_json, sync_path, write_json, write_text
from vlp.lock import FolderLock

_REPLACED_GLOB = ".replaced-*"
BUILD_VERSION = 1  # raised whenever equal inputs give other shards


def build_in_steps(
    specs: Iterable[SampleSpec | Fault],
    originals: Originals,
    out: Path,
    options: BuildOptions,
    *,
    title: str,
    total: int | None,
    arguments: Mapping[str, Any],
) -> Generator[dict[str, Any], None, None]:
    """Write shards, their index and `OUT/manifest.json`; shards up to date are not written again.

    Yields {} after `specs` were checked against the shards in `out`, before a shard is written;
    then the manifest. arguments: command-line arguments on which the shards depend.
    """
    settings = {
        "version": BUILD_VERSION,
        "samples_per_shard": options.samples_per_shard,
        "max_side": options.max_side,
        "quality": options.quality,
        **arguments,
    }
    build_settings = json.loads(json.dumps({"data_set": title, **settings}))
    take_down = TakeDown.read(options.take_down, out)
    total = total or length_hint(specs) or None
    try:
        with ExitStack() as stack:
            stack.enter_context(FolderLock(out))
            if options.replace:
                _move_earlier_build(out, build_settings)
            journal = stack.enter_context(Journal(out, build_settings))
            # Left by a killed run; at the end of the context, by an error of this run.
            _remove_unfinished(out)
            stack.callback(_remove_unfinished, out)
            plan = BuildPlan(originals, journal, options, take_down)
            jobs = plan.jobs(specs)
            # Yielded after the check of the specs against all existing shards.
            first = list(islice(jobs, 1))
            yield {}
            # Shards of an earlier run do not count in the bar's speed.
            initial = plan.num_unchanged
            bar = tqdm(total=total, desc=str(out), unit=" samples", smoothing=0.05, initial=initial)
            with bar:
                # Shards are independent, so they are published in the order they finish.
                results = options.workers().map(make_shard, chain(first, jobs), ordered=False)
                for record, path in results:
                    _publish(journal, record, path)
                    bar.update(record.wanted)
                bar.update(plan.num_unchanged - initial)
            journal.finish(plan.num_shards)
            manifest = make_manifest(plan, title, settings)
            _update_index(out, manifest)
            write_json(out / MANIFEST_NAME, manifest, indent=1, durable=True, ensure_ascii=False)
            # Delete the replaced shards only after a complete build that is not empty.
            if options.replace and manifest["samples"]:
                for folder in out.glob(_REPLACED_GLOB):
                    shutil.rmtree(folder)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or out}: cannot be written ({error.strerror}); finished shards stay, "
            "run the same command again to go on"
        ) from error
    yield manifest


def _move_earlier_build(out: Path, build_settings: Mapping[str, Any]) -> None:
    """Move an earlier build into `.replaced-NNN`, unless a run of the same settings has done so.

    Refuses tars that no build wrote, before anything is moved.
    """
    marker, number = "replaced_by.json", len(list(out.glob(_REPLACED_GLOB)))
    has_build = number > 0 or (out / JOURNAL_NAME).exists()
    if number:
        last = out / _REPLACED_GLOB.replace("*", f"{number - 1:03d}")
        if not (last / marker).exists():
            number -= 1  # a run was killed while it moved files: continue in its folder
        elif parse_json((last / marker).read_bytes()) == build_settings:
            return
    require_build_shards(out, has_build)
    # The marker is written even without a build, so that the same command continues its own.
    folder = out / _REPLACED_GLOB.replace("*", f"{number:03d}")
    folder.mkdir(exist_ok=True)
    bookkeeping = [out / name for name in (JOURNAL_NAME, MANIFEST_NAME, INDEX_NAME)]
    for path in (*out.glob("*.tar"), *out.glob(TABLE_GLOB), *bookkeeping):
        if has_build and path.exists():
            path.rename(folder / path.name)
    write_text(folder / marker, json.dumps(build_settings))


def _publish(journal: Journal, record: Record, unfinished: Path) -> None:
    path = journal.folder / record.name
    # Delete the index before the shard changes. Its sizes may still fit: tars are padded to 10 KiB.
    (journal.folder / INDEX_NAME).unlink(missing_ok=True)
    journal.add(record)
    if record.samples:
        unfinished.rename(path)
    else:
        unfinished.unlink()
        path.unlink(missing_ok=True)
    sync_path(journal.folder)


def _remove_unfinished(out: Path) -> None:
    for path in out.glob("shard-[0-9]*.tar.[0-9]*.tmp"):
        path.unlink(missing_ok=True)


def _update_index(out: Path, manifest: Mapping[str, Any]) -> None:
    # An index that fits is kept, as indexing reads every shard.
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


def make_manifest(plan: BuildPlan, title: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of a finished build; an interrupted and resumed build gives the same."""
    records = [plan.journal.records[number] for number in range(plan.num_shards)]
    failures = {kind: list(ids) for kind, ids in plan.faults.items()}
    for record in records:
        for kind, ids in record.failures.items():
            failures.setdefault(kind, []).extend(ids)
        if record.taken_down:
            failures.setdefault("taken down", []).extend(record.taken_down)
    unmatched = sorted(plan.take_down.lines - plan.take_down.matched_lines)
    return {
        "title": title,
        "licence": plan.options.licence,
        "arguments": {**arguments, "limits": limits().model_dump()},
        "samples": sum(record.samples for record in records),
        "captions": sum(record.captions for record in records),
        "bytes": sum(record.bytes for record in records),
        "shards": [
            {"name": record.name, **record.model_dump(include={"samples", "bytes", "sha256"})}
            for record in records
            if record.samples
        ],
        "failures": {
            kind: {"count": len(ids), "ids": ids} for kind, ids in sorted(failures.items())
        },
        "take_down_without_a_sample": unmatched,
        "problems": plan.originals.problems,
        "versions": {"pillow": PIL.__version__, "libjpeg_turbo": features.version("libjpeg_turbo")},
    }


def print_manifest(out: Path, manifest: Mapping[str, Any]) -> None:
    """Print the numbers of samples, and of failures by kind with the first id."""
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
        print(f"  {out / MANIFEST_NAME} lists all of them")


_COCO = re.compile(r"(?:COCO_(?:train|val|test)20\d\d_)?0*(\d{1,12})")
Specs = Iterable[SampleSpec | Fault]


class CorpusPart(NamedTuple):
    """A folder of shards to build: `OUT/NAME`, or OUT with an empty name."""

    name: str
    specs: Specs | Callable[[Originals], Specs]  # or a function that returns specs for the images
    total: int | None = None  # samples, for the progress bar


class Target(NamedTuple):
    """Output folder and options of a build, and fields of its manifest."""

    out: Path
    build: BuildOptions
    title: str
    licence: str
    settings: Mapping[str, Any]  # arguments on which the shards depend; files without folders


def convert_rows(
    target: Target,
    images: Sequence[Path],
    samples: Iterable[SampleSpec],
    faults: Faults,
    total: int,
    originals: Callable[[Sequence[Path]], Originals] = Originals,
) -> int:
    """Build one folder of shards as `make_corpus` does; `faults` fills while `samples` is read."""
    part = benchmark_part("", samples, faults, total, target.title)
    return make_corpus(target, images, [part], originals)


def benchmark_part(
    name: str, samples: Iterable[SampleSpec], faults: Faults, total: int, title: str
) -> CorpusPart:
    """Return a part; its manifest counts questions and expressions of missing images, too."""
    specs = iter(samples)
    # Read a row before archives are unpacked (minutes), so that a wrong file fails at once.
    first = next(specs, None)
    if first is None:
        detail = f"; the first is of kind {faults[0].kind!r}: {faults[0].id}" if faults else ""
        raise ConfigError(f"{name or title}: no row can be used{detail}")
    return CorpusPart(name, partial(_with_faults, chain([first], specs), faults), total)


def make_corpus(
    target: Target,
    images: Sequence[Path],
    parts: Sequence[CorpusPart],
    originals: Callable[[Sequence[Path]], Originals] = Originals,
) -> int:
    """Build all parts and print their manifests; returns the exit code (1: no sample written)."""
    try:
        with unpack_archives(images, target.out) as paths:
            return build_parts(target, parts, originals(paths))
    except OSError as error:
        raise ConfigError(f"{error.filename or target.out}: {error.strerror}") from error


def build_parts(
    target: Target,
    parts: Sequence[CorpusPart],
    originals: Originals,
    before_writing: Callable[[], object] = lambda: None,
) -> int:
    """Build parts as `make_corpus` does; `before_writing` is called once all of them fit OUT."""
    options = replace(target.build, licence=target.build.licence or target.licence)
    written, failures = 0, set[str]()
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
            # A part that does not fit is an error before any part changes. With --replace every
            # part fits, and earlier shards move only when the part is built.
            if not options.replace:
                next(build)
        before_writing()
        for part, build in zip(parts, builds, strict=True):
            *_, manifest = build
            print_manifest(target.out / part.name, manifest)
            written += manifest["samples"]
            failures.update(manifest["failures"])
    if not written:
        hint = "; are --images the images of this corpus?" if "missing image" in failures else ""
        print(f"{target.out}: no sample was written{hint}")
    return 0 if written else 1


def check_splits(splits: Sequence[str] | None, available: Sequence[str]) -> None:
    """Refuse splits of the command line that a data set does not have."""
    if unknown := sorted(set(splits or ()) - set(available)):
        raise ConfigError(f"--splits: there is no {unknown[0]!r}, only {', '.join(available)}")


def key_of(identifier: str) -> str:
    """Return a sample's key from an id: all but ASCII letters, digits and hyphens become `_`."""
    return re.sub(r"[^0-9A-Za-z-]", "_", identifier)


def stems_of(names: Iterable[str]) -> dict[str, str]:
    """Return stems by name: file stem, else path and stem, else name, the first with unique key."""
    forms: tuple[Callable[[str], str], ...] = (
        lambda name: PurePosixPath(name).stem,
        lambda name: str(PurePosixPath(name).parent / PurePosixPath(name).stem),
        str,
    )
    ambiguous = list(dict.fromkeys(names))
    stems: dict[str, str] = {}
    for form in forms:
        by_key: dict[str, list[str]] = defaultdict(list)
        for name in ambiguous:
            by_key[key_of(form(name))].append(name)
        stems |= {group[0]: form(group[0]) for group in by_key.values() if len(group) == 1}
        ambiguous = [name for name in ambiguous if name not in stems]
    return stems | {name: name for name in ambiguous}


def image_identity(name: str, source: str, unique_stem: str | None = None) -> tuple[str, str]:
    """Return (source, image_id) of an image file: the id is its stem, or `unique_stem` if given.

    `COCO_val2014_000000000042.jpg` gives ("coco", "42") in any source, so that an image of several
    benchmarks has one identity; `000000000042.jpg` does so in source "coco".
    """
    stem = PurePosixPath(name).stem
    if unique_stem not in (None, stem):
        return source, str(unique_stem)
    match = _COCO.fullmatch(stem)
    if match and (stem.startswith("COCO_") or source == "coco"):
        return "coco", match[1]
    return source, stem


def _with_faults(
    samples: Iterable[SampleSpec], faults: Faults, originals: Originals
) -> Iterator[SampleSpec | Fault]:
    """Yield samples, a fault for each question or expression of a missing image, then `faults`."""
    for sample in samples:
        yield sample
        if None in map(originals.find, sample.images):
            for question in sample.annotation.questions or ():
                yield Fault("question of a missing image", question.id)
            for expression in sample.annotation.expressions or ():
                yield Fault("expression of a missing image", expression.id)
    yield from faults
