"""Checks of shards, their index and their manifest; and the command that writes an index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from tqdm import tqdm
from typer import Argument, Option

from data_tools.builder.build import MANIFEST_NAME
from data_tools.executor import Executor, open_ledger
from data_tools.options import File, Folders, WorkerOptions
from data_tools.shards import (
    NameHashes,
    Shard,
    ShardReader,
    find_repeated,
    hash_names,
    repeated_keys,
    scan,
    tars_in,
)
from vlp.config import ConfigError
from vlp.data.image.decode import decode_image, open_image
from vlp.data.shards.index import (
    INDEX_NAME,
    Survey,
    index_folder,
    map_samples,
    read_table,
    sample_rows,
)
from vlp.data.shards.sample_files import IMAGES, BadSample, SampleFiles
from vlp.data.shards.shard_reader import ShardIndex
from vlp.io import sha256_of
from vlp.lock import FolderLock


class Finding(NamedTuple):
    """Result for a shard, or for a whole folder (`contents` is None)."""

    damage: list[Damage]
    contents: ShardContents | None = None
    images: int = 0
    keys: NameHashes = np.empty(0, np.uint64)


def verify(
    folders: Folders,
    workers: WorkerOptions,
    quick: Annotated[
        bool, Option("--quick", help="headers and structure only: no content is read")
    ] = False,
    report: Annotated[Path | None, File(help="write all damage here")] = None,
) -> int:
    """Check shards: every tar, every annotation, every image, the index and the manifest.

        vlp data verify shards/cc3m shards/sbu --report damage.tsv

    Damage is printed as it is found, and counted by kind at the end. --report FILE has a line for
    each: kind, tab, location; with it, the same command continues an interrupted check. The exit
    code is 1 if there is damage. A flipped byte that leaves an image decodable is found only if
    manifest.json has the sha256 of the shard.
    """
    executor = workers.workers()
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder of shards")
    counts: Counter[str] = Counter()
    images = samples = 0
    with ExitStack() as stack:
        file = ledger = None
        if report is not None:
            file = stack.enter_context(_open_report(report))
            ledger = stack.enter_context(open_ledger(Path(f"{report}.tasks")))
        for folder in {folder.resolve(): folder for folder in folders}.values():
            for finding in check(folder, quick, executor, ledger):
                images += finding.images
                samples += finding.contents.samples if finding.contents else 0
                for damage in finding.damage:
                    counts[damage.kind] += 1
                    _report(damage, counts[damage.kind], file)
    print(f"{samples} samples, {images} images {'listed' if quick else 'decoded'}")
    for kind, count in sorted(counts.items()):
        print(f"  {kind}: {count}")
    if counts and report is not None:
        print(f"{report} lists all of them")
    print(f"damaged in {counts.total()} places" if counts else "no damage")
    return 1 if counts else 0


def index(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="holds the *.tar files")],
    workers: WorkerOptions,
) -> int:
    """Write index.npz for a folder of WebDataset shards, as img2dataset and others make them.

    A damaged shard is indexed up to the damage; the exit code is then 1.
    """
    executor = workers.workers()
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder of shards")
    with FolderLock(folder), open_ledger(folder / ".index.tasks") as ledger:

        def survey_all(work: Callable[[Path], Survey], shards: Sequence[Path]) -> Iterator[Survey]:
            surveys = executor.map(work, shards, ledger=ledger)
            yield from tqdm(surveys, total=len(shards), unit="shard", disable=None)

        problems = index_folder(folder, survey_all)
    shards = ShardIndex.open(folder).shards
    captions, without = int(shards.captions.sum()), int(shards.uncaptioned.sum())
    print(f"{folder}: {len(shards)} shards, {shards.total} samples, {captions} captions")
    if without:
        print(f"  {without} samples have no caption; a pretraining skips and counts them")
    for problem in problems:
        print(f"  {problem}")
    return int(any(not problem.endswith(": empty") for problem in problems))


def check(
    folder: Path, quick: bool, executor: Executor, ledger: Path | None = None
) -> Iterator[Finding]:
    """Check the shards of a folder one by one, then all together with index and manifest."""
    shards = []
    # A folder without any shard is checked if an index or a manifest lists missing shards.
    is_listed = any((folder / name).exists() for name in (INDEX_NAME, MANIFEST_NAME))
    if not is_listed or any(folder.glob("*.tar")):
        shards = tars_in(folder)
    manifest, damage = read_manifest(folder)
    with_sha256 = not quick and any(entry.sha256 for entry in manifest or ())
    work = partial(check_shard, quick=quick, with_sha256=with_sha256)
    contents: dict[str, ShardContents] = {}
    keys: list[NameHashes] = []
    for shard, finding in scan(work, shards, executor, f"verify {folder}", ledger=ledger):
        yield finding
        keys.append(finding.keys)
        if finding.contents is not None:
            contents[shard.name] = finding.contents
    damage += against_index(folder, contents)
    if manifest is not None:
        damage += against_manifest(folder, manifest, contents)
    _, duplicates = find_repeated(keys)
    if len(duplicates):
        occurrences: set[str] = set()
        for shard, key in repeated_keys(shards, duplicates, executor):
            if key in occurrences:
                damage.append(Damage("duplicate key", f"{shard}, {key} (came before)"))
            occurrences.add(key)
    yield Finding(damage)


def check_shard(shard: Shard, quick: bool, with_sha256: bool) -> Finding:
    """Check a shard's samples; `with_sha256` hashes the tar for the manifest's check."""
    with ShardReader(shard.path) as reader:
        if reader.missing:
            return Finding([Damage("missing shard", f"{shard} ({reader.problem})")])
        damage, captions, images = [], [], 0
        if reader.problem:
            where = f"{shard}: {reader.problem}, {len(reader.samples)} samples before it"
            damage.append(Damage("corrupt shard", where))
        elif not reader.samples:
            damage.append(Damage("empty shard", str(shard)))
        check_sample = _check_headers if quick else _check_content
        for sample in reader.samples:
            images += sum(name.removeprefix("1.") in IMAGES for name in sample.files)
            damage += [Damage(bad.kind, bad.where) for bad in check_sample(reader, sample)]
            captions.append(0 if quick else reader.count_captions(sample))
        locations, rows = _digests(sample_rows(reader.samples, captions))
        contents = ShardContents(
            len(reader.samples),
            reader.bytes,
            locations,
            captions=None if quick else sum(captions),
            rows=None if quick else rows,
            sha256=sha256_of(shard.path) if with_sha256 else None,
        )
        return Finding(damage, contents, images, hash_names(reader.keys))


def _check_headers(shard: ShardReader, sample: SampleFiles) -> Iterator[BadSample]:
    if not any(name in IMAGES for name in sample.files):
        yield BadSample("missing image", shard.where(sample))
    for name, member in sample.files.items():
        if name.removeprefix("1.") in IMAGES and member.size == 0:
            yield BadSample("unreadable image", f"{shard.where(sample)}.{name} (0 bytes)")


def _check_content(shard: ShardReader, sample: SampleFiles) -> Iterator[BadSample]:
    try:
        # Reading refuses repeated keys, which `check` reports for all shards.
        raw = shard.read(sample._replace(repeated=False))
    except BadSample as bad:
        yield bad
        return
    for data in (raw.image, raw.second_image):
        if data is not None:
            try:
                decode_image(data, raw.where)
                _check_png_checksums(data, raw.where)
            except BadSample as bad:
                yield bad


def _check_png_checksums(data: bytes, where: str) -> None:
    # Decoding does not verify the checksums of a PNG's chunks.
    if data.startswith(b"\x89PNG"):
        try:
            with open_image(data, where) as image:
                image.verify()
        except Exception as error:  # Pillow raises many classes
            raise BadSample("unreadable image", f"{where} ({error})") from error


def _open_report(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error


_MAX_PRINTED = 10  # of a kind


def _report(damage: Damage, count: int, report: IO[str] | None) -> None:
    if report is not None:
        report.write(f"{damage.kind}\t{damage.where}\n")
        report.flush()
    if count <= _MAX_PRINTED:
        tqdm.write(f"{damage.kind}: {damage.where}")
    elif count == _MAX_PRINTED + 1:
        tqdm.write(f"{damage.kind}: more, which are only counted")


class Damage(NamedTuple):
    """A kind of damage, such as `corrupt shard` or a kind of BadSample, and its location."""

    kind: str
    where: str


class ShardContents(NamedTuple):
    """Properties of a shard that its index or manifest states; None if not computed."""

    samples: int
    bytes: int
    locations: str  # digest of the samples' offsets and sizes
    captions: int | None = None
    rows: str | None = None  # digest of the index's rows: locations and numbers of captions
    sha256: str | None = None


class ManifestShard(BaseModel):
    """A shard in its manifest; missing fields are not compared."""

    name: str
    samples: int | None = None
    bytes: int | None = None
    sha256: str | None = None


class _Manifest(BaseModel):
    shards: list[ManifestShard]


def against_index(folder: Path, contents: Mapping[str, ShardContents]) -> list[Damage]:
    """Return the differences between a folder's index and its shards, by name."""
    path = folder / INDEX_NAME
    remedy = f"make a new one with: vlp data index {folder}"
    try:
        with path.open("rb") as file:
            shards = read_table(file, str(path), remedy)
        rows = map_samples(folder / shards.file, shards, check=False)
    except FileNotFoundError:
        return [Damage("missing index", f"{path} ({remedy})")]
    except OSError as error:
        return [Damage("unusable index", f"{path} ({error.strerror})")]
    except ConfigError as error:
        return [Damage("unusable index", str(error))]
    listed = {entry.name for entry in shards}
    damage = [
        Damage("index differs", f"{folder / name}: is not in {INDEX_NAME}")
        for name in sorted(contents.keys() - listed)
    ]
    if rows is None:
        damage.append(Damage("unusable index", f"{folder / shards.file}: is not there"))
    # The table has the rows of the first shard's samples, then of the second's ...
    starts = (np.cumsum(shards.samples) - shards.samples).tolist()
    for entry, start in zip(shards, starts):
        actual = contents.get(entry.name)
        if actual is None:
            damage.append(Damage("index differs", f"{folder / entry.name}: is not there"))
            continue
        difference = _difference(entry, actual, ("samples", "bytes", "captions"))
        if difference is None and rows is not None:
            locations, row_digest = _digests(rows[start : start + entry.samples])
            if locations != actual.locations or actual.rows not in (None, row_digest):
                difference = "its samples have other offsets, or other captions"
        if difference is not None:
            damage.append(Damage("index differs", f"{folder / entry.name}: {difference}"))
    return damage


def read_manifest(folder: Path) -> tuple[list[ManifestShard] | None, list[Damage]]:
    """Return the shards of `manifest.json` (None without one) and damage to it."""
    path = folder / MANIFEST_NAME
    try:
        return _Manifest.model_validate_json(path.read_bytes()).shards, []
    except FileNotFoundError:
        return None, []
    except (OSError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        return None, [Damage("unusable manifest", f"{path} ({reason})")]


def against_manifest(
    folder: Path, manifest: Sequence[ManifestShard], contents: Mapping[str, ShardContents]
) -> list[Damage]:
    """Return the differences between a folder's manifest and its shards, by name."""
    damage = []
    for entry in manifest:
        actual = contents.get(entry.name)
        difference: str | None = "is not there"
        if actual is not None:
            difference = _difference(entry, actual, ("samples", "bytes", "sha256"))
        if difference is not None:
            damage.append(Damage("manifest differs", f"{folder / entry.name}: {difference}"))
    for name in sorted(contents.keys() - {entry.name for entry in manifest}):
        damage.append(Damage("manifest differs", f"{folder / name}: is not in {MANIFEST_NAME}"))
    return damage


def _difference(entry: object, contents: ShardContents, fields: Sequence[str]) -> str | None:
    """Return the first difference as text, else None; a field that is None is not compared."""
    for field in fields:
        expected, actual = getattr(entry, field), getattr(contents, field)
        if expected is not None and actual is not None and expected != actual:
            return f"{field}: {actual}, but {expected} is listed"
    return None


def _digests(rows: NDArray[np.void]) -> tuple[str, str]:
    """Return digests of the locations in rows of an index, and of the whole rows."""
    locations = np.stack((rows["start"], rows["blocks"]))
    return tuple(blake2b(part.tobytes(), digest_size=8).hexdigest() for part in (locations, rows))  # type: ignore[return-value]
