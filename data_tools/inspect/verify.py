"""Check shards: every tar, every annotation, every image, the index and the manifest.

    python -m data_tools verify shards/cc3m shards/sbu
    python -m data_tools verify shards/cc3m --quick       # headers only, no image is decoded
    python -m data_tools verify shards/cc3m --fix         # and index anew where the index is wrong

Damage is printed as it is found and counted by kind at the end; `--report FILE` keeps all of it,
one line each: kind, tab, place, and with it an interrupted check goes on where it was. The exit
code is 1 if any is left. Only `--fix` writes into a folder, and nothing but its index. A flipped
byte that leaves an image decodable shows only against the sha256 of a manifest.json.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from tqdm import tqdm

from data_tools.executor.executor import Executor, open_ledger
from data_tools.executor.options import add_executor, executor_of
from data_tools.inspect.index_check import (
    INDEX_KINDS,
    MANIFEST_NAME,
    Damage,
    ShardContents,
    against_index,
    against_manifest,
    found_rows,
    read_manifest,
)
from data_tools.scan.keys import keys_in, repeated_keys
from data_tools.scan.repeated_ids import Numbers, RepeatedIds, numbers_of
from data_tools.scan.shard_reader import Shard, ShardReader, scan, shards_of
from vlp.config import ConfigError
from vlp.data.image.decode import decode_image, open_image
from vlp.data.schema import captions_of
from vlp.data.shards.build_index import index_folder
from vlp.data.shards.index import INDEX_NAME
from vlp.data.shards.sample_files import IMAGES, BadSample, SampleFiles, parse, parse_annotation
from vlp.io import sha256_of
from vlp.lock import FolderLock


class Examined(NamedTuple):
    """A shard, or what is wrong with a folder as a whole (`found` is None)."""

    damage: list[Damage]
    found: ShardContents | None = None
    images: int = 0
    keys: Numbers = np.empty(0, np.uint64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="folder of shards")
    parser.add_argument(
        "--quick", action="store_true", help="headers and structure only: no content is read"
    )
    parser.add_argument("--fix", action="store_true", help="index anew where the index is wrong")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write all damage here")
    parser.add_argument(
        "--places", type=int, default=10, metavar="N", help="print so many a kind (default 10)"
    )
    add_executor(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check every folder; 1 if damage is left at the end."""
    executor = executor_of(arguments)
    counts: Counter[str] = Counter()
    fixed: Counter[str] = Counter()
    images = samples = 0
    with ExitStack() as stack:
        report = ledger = None
        if arguments.report is not None:
            report = stack.enter_context(_opened(arguments.report))
            ledger = stack.enter_context(open_ledger(Path(f"{arguments.report}.tasks")))
        for folder in _distinct(arguments.folders):
            before = counts.copy()
            for examined in check(folder, arguments.quick, executor, ledger):
                images += examined.images
                samples += examined.found.samples if examined.found else 0
                for damage in examined.damage:
                    counts[damage.kind] += 1
                    _tell(damage, counts[damage.kind], arguments.places, report)
            repairs = {kind: counts[kind] - before[kind] for kind in INDEX_KINDS}
            if arguments.fix and any(repairs.values()):
                with FolderLock(folder):
                    index_folder(folder, executor.map)
                print(f"{folder}: indexed anew")
                fixed.update(repairs)
    looked_at = "listed" if arguments.quick else "decoded"
    print(f"{samples} samples, {images} images {looked_at}")
    for kind, count in sorted(counts.items()):
        print(f"  {kind}: {count}{', repaired' if fixed[kind] == count else ''}")
    if counts and arguments.report is not None:
        print(f"{arguments.report} names every one of them")
    left = (counts - fixed).total()
    print(f"damaged in {left} places" if left else "no damage")
    return 1 if left else 0


def check(
    folder: Path, quick: bool, executor: Executor, ledger: Path | None = None
) -> Iterator[Examined]:
    """Examine a folder: its shards one by one, then what they say together.

    Shards whose result is in the ledger are not read again.
    """
    shards = []
    # Where no shard is left, an index or a manifest may still say what there should be.
    listed = any((folder / name).exists() for name in (INDEX_NAME, MANIFEST_NAME))
    if not listed or any(folder.glob("*.tar")):
        shards = shards_of([folder])
    manifest, damage = read_manifest(folder)
    hashed = not quick and any(entry.sha256 for entry in manifest or ())
    work = partial(examine, quick=quick, hashed=hashed)
    found: dict[str, ShardContents] = {}
    keys = RepeatedIds()
    for shard, examined in scan(work, shards, executor, f"verify {folder}", ledger=ledger):
        yield examined
        keys.add(examined.keys)
        if examined.found is not None:
            found[shard.name] = examined.found
    damage += against_index(folder, found)
    if manifest is not None:
        damage += against_manifest(folder, manifest, found)
    yield Examined(damage)
    repeated = keys.result().values
    if len(repeated):
        yield Examined(list(_duplicates(shards, repeated, executor)))


def examine(shard: Shard, quick: bool = False, hashed: bool = False) -> Examined:
    """Read one shard to its end.

    Args:
        shard: the shard.
        quick: read headers only.
        hashed: take the sha256 of the whole tar too.
    """
    with ShardReader(shard.path) as opened:
        if opened.missing:
            return Examined([Damage("missing shard", f"{shard} ({opened.problem})")])
        damage, captions, images = _damage_of(opened), [], 0
        for number, sample in enumerate(opened.samples):
            images += sum(name.removeprefix("1.") in IMAGES for name in sample.files)
            look = _structure if quick else _content
            damage.extend(Damage(bad.kind, bad.where) for bad in look(opened, number))
            captions.append(0 if quick else _captions(opened, sample))
        places, rows = found_rows(opened.samples, captions)
        keys = numbers_of(keys_in(opened))
        found = ShardContents(len(opened), shard.path.stat().st_size, places)
        if not quick:
            found = found._replace(captions=sum(captions), rows=rows)
        if hashed:
            found = found._replace(sha256=sha256_of(shard.path))
        return Examined(damage, found, images, keys)


def _duplicates(shards: Sequence[Shard], repeated: Numbers, executor: Executor) -> Iterator[Damage]:
    seen: set[str] = set()
    for shard, name in repeated_keys(shards, repeated, executor):
        if name in seen:
            yield Damage("duplicate key", f"{shard}, {name} (came before)")
        seen.add(name)


def _damage_of(shard: ShardReader) -> list[Damage]:
    if shard.problem:
        place = f"{shard.path}: {shard.problem}, {len(shard)} samples before it"
        return [Damage("corrupt shard", place)]
    return [] if len(shard) else [Damage("empty shard", str(shard.path))]


def _structure(shard: ShardReader, number: int) -> Iterator[BadSample]:
    files = shard.samples[number].files
    if not any(name in IMAGES for name in files):
        yield BadSample("missing image", shard.where(number))
    for name, member in files.items():
        if name.removeprefix("1.") in IMAGES and member.size == 0:
            yield BadSample("unreadable image", f"{shard.where(number)}.{name} (0 bytes)")


def _content(shard: ShardReader, number: int) -> Iterator[BadSample]:
    # A key that came before is found over all shards; here its files count like any others.
    files = shard.samples[number]._replace(repeated=False)
    try:
        sample = parse(files, shard.content, shard.where(number))
    except BadSample as bad:
        yield bad
        return
    for data in (sample.image, sample.second_image):
        if data is not None:
            try:
                decode_image(data, shard.where(number))
                _check_sums(data, shard.where(number))
            except BadSample as bad:
                yield bad


def _captions(shard: ShardReader, sample: SampleFiles) -> int:
    """Count captions as the index does."""
    try:
        return len(captions_of(parse_annotation(sample, shard.content, sample.key)))
    except BadSample:
        return 0


def _check_sums(data: bytes, where: str) -> None:
    """Verify the checksums of a PNG's chunks, which decoding alone does not look at."""
    if data.startswith(b"\x89PNG"):
        try:
            with open_image(data, where) as image:
                image.verify()
        except Exception as error:  # as in decode_image: all of them mean the same
            raise BadSample("unreadable image", f"{where} ({error})") from error


def _opened(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error


def _tell(damage: Damage, count: int, limit: int, report: IO[str] | None) -> None:
    if report is not None:
        report.write(f"{damage.kind}\t{damage.where}\n")
        report.flush()
    if count <= limit:
        tqdm.write(f"{damage.kind}: {damage.where}")
    elif count == limit + 1:
        tqdm.write(f"{damage.kind}: more of them, which are counted")


def _distinct(folders: Sequence[Path]) -> list[Path]:
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder of shards")
    return list({folder.resolve(): folder for folder in folders}.values())
