"""Checks of shards against themselves, their index and their manifest; new indexes."""

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

from data_tools.executor import Executor, open_ledger
from data_tools.options import File, Folders, WorkerOptions
from data_tools.shards import (
    Numbers,
    Shard,
    ShardReader,
    keys_in,
    numbers_of,
    repeated,
    repeated_keys,
    scan,
    tars_in,
)
from vlp.config import ConfigError
from vlp.data.image.decode import decode_image, open_image
from vlp.data.schema import captions_of
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


class Examined(NamedTuple):
    """A shard, or a problem of its folder as a whole (`contents` is None)."""

    damage: list[Damage]
    contents: ShardContents | None = None
    images: int = 0
    keys: Numbers = np.empty(0, np.uint64)


def verify(
    folders: Folders,
    workers: WorkerOptions,
    quick: Annotated[
        bool, Option("--quick", help="headers and structure only: no content is read")
    ] = False,
    report: Annotated[Path | None, File(help="write all damage here")] = None,
) -> int:
    """Check shards: every tar, every annotation, every image, the index and the manifest.

        python -m data_tools verify shards/cc3m shards/sbu --report damage.tsv

    Damage is printed as it is found and counted by kind at the end; --report FILE keeps all of it,
    one line each: kind, tab, place, and with it an interrupted check goes on where it was. The exit
    code is 1 if there is any. A flipped byte that leaves an image decodable shows only against the
    sha256 of a manifest.json.
    """
    executor = workers.workers()
    counts: Counter[str] = Counter()
    images = samples = 0
    with ExitStack() as stack:
        file = ledger = None
        if report is not None:
            file = stack.enter_context(_opened(report))
            ledger = stack.enter_context(open_ledger(Path(f"{report}.tasks")))
        for folder in _distinct(folders):
            for examined in check(folder, quick, executor, ledger):
                images += examined.images
                samples += examined.contents.samples if examined.contents else 0
                for damage in examined.damage:
                    counts[damage.kind] += 1
                    _tell(damage, counts[damage.kind], file)
    print(f"{samples} samples, {images} images {'listed' if quick else 'decoded'}")
    for kind, count in sorted(counts.items()):
        print(f"  {kind}: {count}")
    if counts and report is not None:
        print(f"{report} names every one of them")
    print(f"damaged in {counts.total()} places" if counts else "no damage")
    return 1 if counts else 0


def index(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="holds the *.tar files")],
    workers: WorkerOptions,
) -> int:
    """Write index.npz for a folder of WebDataset shards, as img2dataset and others make them.

    The exit code is 1 if shards are damaged; each is indexed as far as it can be read.
    """
    executor = workers.workers()
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder of shards")
    with FolderLock(folder), open_ledger(folder / ".index.tasks") as ledger:

        def surveys(work: Callable[[Path], Survey], shards: Sequence[Path]) -> Iterator[Survey]:
            surveyed = executor.map(work, shards, ledger=ledger)
            yield from tqdm(surveyed, total=len(shards), unit="shard", disable=None)

        problems = index_folder(folder, surveys)
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
) -> Iterator[Examined]:
    """Examine a folder's shards one by one (unless in the ledger), then all together."""
    shards = []
    # Where no shard is left, an index or a manifest may still say what there should be.
    listed = any((folder / name).exists() for name in (INDEX_NAME, MANIFEST_NAME))
    if not listed or any(folder.glob("*.tar")):
        shards = tars_in(folder)
    manifest, damage = read_manifest(folder)
    hashed = not quick and any(entry.sha256 for entry in manifest or ())
    work = partial(examine, quick=quick, hashed=hashed)
    contents: dict[str, ShardContents] = {}
    keys: list[Numbers] = []
    for shard, examined in scan(work, shards, executor, f"verify {folder}", ledger=ledger):
        yield examined
        keys.append(examined.keys)
        if examined.contents is not None:
            contents[shard.name] = examined.contents
    damage += against_index(folder, contents)
    if manifest is not None:
        damage += against_manifest(folder, manifest, contents)
    yield Examined(damage)
    duplicates = repeated(keys).values
    if len(duplicates):
        yield Examined(list(_duplicates(shards, duplicates, executor)))


def examine(shard: Shard, quick: bool = False, hashed: bool = False) -> Examined:
    """Read one shard to its end; `hashed` takes the sha256 of the whole tar too."""
    with ShardReader(shard.path) as opened:
        if opened.missing:
            return Examined([Damage("missing shard", f"{shard} ({opened.problem})")])
        damage, captions, images = _damage_of(opened), [], 0
        for sample in opened.samples:
            images += sum(name.removeprefix("1.") in IMAGES for name in sample.files)
            look = _structure if quick else _content
            damage.extend(Damage(bad.kind, bad.where) for bad in look(opened, sample))
            captions.append(0 if quick else _captions(opened, sample))
        locations, rows = _digests(sample_rows(opened.samples, captions))
        keys = numbers_of(keys_in(opened))
        contents = ShardContents(len(opened), shard.path.stat().st_size, locations)
        if not quick:
            contents = contents._replace(captions=sum(captions), rows=rows)
        if hashed:
            contents = contents._replace(sha256=sha256_of(shard.path))
        return Examined(damage, contents, images, keys)


def _duplicates(
    shards: Sequence[Shard], duplicates: Numbers, executor: Executor
) -> Iterator[Damage]:
    keys: set[str] = set()
    for shard, key in repeated_keys(shards, duplicates, executor):
        if key in keys:
            yield Damage("duplicate key", f"{shard}, {key} (came before)")
        keys.add(key)


def _damage_of(shard: ShardReader) -> list[Damage]:
    if shard.problem:
        place = f"{shard.path}: {shard.problem}, {len(shard)} samples before it"
        return [Damage("corrupt shard", place)]
    return [] if len(shard) else [Damage("empty shard", str(shard.path))]


def _structure(shard: ShardReader, files: SampleFiles) -> Iterator[BadSample]:
    if not any(name in IMAGES for name in files.files):
        yield BadSample("missing image", shard.where(files))
    for name, member in files.files.items():
        if name.removeprefix("1.") in IMAGES and member.size == 0:
            yield BadSample("unreadable image", f"{shard.where(files)}.{name} (0 bytes)")


def _content(shard: ShardReader, files: SampleFiles) -> Iterator[BadSample]:
    try:
        # A key that came before is found over all shards; here its files count like any others.
        sample = shard.read(files._replace(repeated=False))
    except BadSample as bad:
        yield bad
        return
    for data in (sample.image, sample.second_image):
        if data is not None:
            try:
                decode_image(data, sample.where)
                _check_sums(data, sample.where)
            except BadSample as bad:
                yield bad


def _captions(shard: ShardReader, sample: SampleFiles) -> int:
    # As the index counts them.
    try:
        return len(captions_of(shard.annotation(sample)))
    except BadSample:
        return 0


def _check_sums(data: bytes, where: str) -> None:
    # Decoding does not verify the checksums of a PNG's chunks.
    if data.startswith(b"\x89PNG"):
        try:
            with open_image(data, where) as image:
                image.verify()
        # As in `decode_image`, all of them mean the same.
        except Exception as error:
            raise BadSample("unreadable image", f"{where} ({error})") from error


def _opened(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error


_MOST_SHOWN = 10  # of a kind


def _tell(damage: Damage, count: int, report: IO[str] | None) -> None:
    if report is not None:
        report.write(f"{damage.kind}\t{damage.where}\n")
        report.flush()
    if count <= _MOST_SHOWN:
        tqdm.write(f"{damage.kind}: {damage.where}")
    elif count == _MOST_SHOWN + 1:
        tqdm.write(f"{damage.kind}: more of them, which are counted")


def _distinct(folders: Sequence[Path]) -> list[Path]:
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder of shards")
    return list({folder.resolve(): folder for folder in folders}.values())


MANIFEST_NAME = "manifest.json"


class Damage(NamedTuple):
    """Kind of damage (one of few) and its location."""

    kind: str
    where: str


class ShardContents(NamedTuple):
    """Contents of a shard, None if not read; `rows` and `locations` are digests of its index."""

    samples: int
    bytes: int
    locations: str
    captions: int | None = None
    rows: str | None = None
    sha256: str | None = None


class ManifestShard(BaseModel):
    """A shard as in its manifest; missing fields are not compared."""

    name: str
    samples: int | None = None
    bytes: int | None = None
    sha256: str | None = None


class _Manifest(BaseModel):
    shards: list[ManifestShard]


def against_index(folder: Path, contents: Mapping[str, ShardContents]) -> list[Damage]:
    """Find the differences between the index and the shards (all, by name)."""
    path = folder / INDEX_NAME
    remedy = f"make a new one with: python -m data_tools index {folder}"
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
    # Rows of all shards follow each other.
    starts = (np.cumsum(shards.samples) - shards.samples).tolist()
    for entry, start in zip(shards, starts):
        actual = contents.get(entry.name)
        if actual is None:
            damage.append(Damage("index differs", f"{folder / entry.name}: is not there"))
            continue
        difference = _difference(entry, actual, ("samples", "bytes", "captions"))
        if difference is None and rows is not None:
            locations, whole = _digests(rows[start : start + entry.samples])
            if locations != actual.locations or actual.rows not in (None, whole):
                difference = "its samples lie elsewhere, or have other captions"
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
    """Find the differences between the manifest and the shards (all, by name)."""
    damage = []
    for entry in manifest:
        actual = contents.get(entry.name)
        difference = "is not there"
        if actual is not None:
            difference = _difference(entry, actual, ("samples", "bytes", "sha256")) or ""
        if difference:
            damage.append(Damage("manifest differs", f"{folder / entry.name}: {difference}"))
    for name in sorted(contents.keys() - {entry.name for entry in manifest}):
        damage.append(Damage("manifest differs", f"{folder / name}: is not in {MANIFEST_NAME}"))
    return damage


def _difference(entry: object, contents: ShardContents, fields: Sequence[str]) -> str | None:
    # A field that one side does not know cannot differ.
    for field in fields:
        expected, actual = getattr(entry, field), getattr(contents, field)
        if expected is not None and actual is not None and expected != actual:
            return f"{field}: {actual}, {expected} is written"
    return None


def _digests(rows: NDArray[np.void]) -> tuple[str, str]:
    locations = np.stack((rows["start"], rows["blocks"]))
    return tuple(blake2b(part.tobytes(), digest_size=8).hexdigest() for part in (locations, rows))  # type: ignore[return-value]
