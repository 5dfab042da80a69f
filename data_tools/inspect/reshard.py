"""Deal the samples of folders of shards into new shards of another size, or in another order.

    python -m data_tools reshard shards/sbu --out shards/sbu-4k --samples-per-shard 4000
    python -m data_tools reshard shards/coco/train shards/cc3m --out shards/both \\
        --samples-per-shard 1000 --shuffle 0 --prefix-keys

Every file of every sample is kept, byte for byte, those that nothing here reads too; only the tar's
headers are written anew, without times and users. Without `--shuffle` the order is that of the
folders, their shards and the samples in them. Files that belong to no sample (no dot in their name)
are left behind.

Shards appear whole. After an interruption run the same command again: finished ones stay, and the
result is the same. A damaged shard gives what lies before the damage; the exit code is then 1.
Needs 10 bytes of disk a sample while it runs, and with `--shuffle` 8 bytes of memory.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data_tools.builder.journal import require_same_settings, shard_name
from data_tools.executor.executor import Executor, go_on
from data_tools.executor.options import add_executor, executor_of
from data_tools.scan.keys import keys_in, prefixed, repeated_keys
from data_tools.scan.repeated_ids import Numbers, RepeatedIds, numbers_of
from data_tools.scan.shard_reader import Shard, ShardReader, scan, shards_of
from vlp.config import ConfigError
from vlp.data.shards.build_index import index_folder
from vlp.data.shards.index import BLOCK, ROW, sample_rows
from vlp.data.shards.lru import LRUCache
from vlp.data.shards.sample_files import grouped
from vlp.data.shards.tar import append_member, close_tar, members_in
from vlp.io import atomic_write, parse_json, write_json
from vlp.lock import FolderLock

RESHARD_VERSION = 1
"""Raised whenever equal arguments give other shards than before."""

SETTINGS_NAME = "reshard.json"
_PLAN_NAME = "reshard.places"
_FILES_KEPT = 128
_NAMED = 5


class Surveyed(NamedTuple):
    """Survey of a shard: places of its samples, numbers of their keys, the problem behind them."""

    rows: NDArray[np.void]
    keys: Numbers
    problem: str | None


class Piece(NamedTuple):
    """One new shard: its samples by their number among all, and where each one comes from."""

    number: int
    samples: NDArray[np.int64]
    sources: list[Shard]
    source: NDArray[np.int64]
    """Of each sample, its place in `sources`."""

    def __str__(self) -> str:
        return shard_name(self.number)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="folder of shards")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--samples-per-shard", type=int, required=True, metavar="N")
    parser.add_argument(
        "--shuffle", type=int, metavar="SEED", help="deal all samples anew (default: keep order)"
    )
    parser.add_argument(
        "--prefix-keys",
        action="store_true",
        help="put the name of its folder before every key, where folders use the same ones",
    )
    add_executor(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan, write what is not there yet, and index it; 1 if a source is damaged."""
    if arguments.samples_per_shard < 1:
        raise ConfigError(f"--samples-per-shard is {arguments.samples_per_shard}, at least 1")
    out: Path = arguments.out
    shards = shards_of(arguments.folders)
    if out.resolve() in {folder.resolve() for folder in arguments.folders}:
        raise ConfigError(f"{out}: is read from; choose another --out")
    prefixes = folder_prefixes(arguments.folders) if arguments.prefix_keys else {}
    with FolderLock(out):
        return _reshard(arguments, shards, prefixes)


def _reshard(
    arguments: argparse.Namespace, shards: Sequence[Shard], prefixes: dict[Path, str]
) -> int:
    out, executor = arguments.out, executor_of(arguments)
    settings = _settings(arguments, shards)
    _refuse_others(out, settings)
    plan = out / _PLAN_NAME
    try:
        problems, counts = survey(shards, plan, prefixes, executor)
        total = int(counts.sum())
        if not total:
            raise ConfigError("there are no samples in these folders")
        write_json(out / SETTINGS_NAME, settings, error=ConfigError)
        _sweep(out)
        order = Order(total, arguments.samples_per_shard, arguments.shuffle)
        missing = [n for n in range(len(order)) if not (out / shard_name(n)).exists()]
        pieces = (order.piece(number, shards, counts) for number in missing)
        write = partial(write_shard, out=out, plan=plan, prefixes=prefixes)
        with tqdm(total=len(missing), desc=str(out), unit="shard") as bar:
            for _ in executor.map(write, pieces):
                bar.update()
    except OSError as error:
        raise ConfigError(
            f"{error.filename or out}: {error.strerror}; finished shards stay, run the same "
            "command again to go on"
        ) from error
    finally:
        plan.unlink(missing_ok=True)
    index_folder(out, executor.map)
    print(f"{out}: {total} samples in {len(order)} shards, {len(missing)} of them new")
    for problem in problems:
        print(f"  damaged: {problem}")
    return 1 if problems else 0


def survey(
    shards: Sequence[Shard], plan: Path, prefixes: dict[Path, str], executor: Executor
) -> tuple[list[str], NDArray[np.int64]]:
    """Write the places of all samples to `plan`, one ROW each.

    Returns:
        What is wrong with the shards, and how many samples each one has.

    Raises:
        ConfigError: a key comes more than once.
    """
    problems, counts, keys = [], [], RepeatedIds()
    work = partial(_survey, prefixes=prefixes)
    with open(plan, "wb") as file:
        for shard, found in scan(work, shards, executor, "survey"):
            if found.problem:
                problems.append(f"{shard}: {found.problem}, {len(found.rows)} samples before it")
            counts.append(len(found.rows))
            keys.add(found.keys)
            file.write(found.rows.tobytes())
    repeated = keys.result().values
    if len(repeated):
        raise ConfigError(_say_repeated(repeated_keys(shards, repeated, executor, prefixes)))
    return problems, np.array(counts, dtype=np.int64)


class Order:
    """Assignment of samples to new shards.

    Args:
        total: samples there are.
        per_shard: samples of a new shard; the last one has what is left.
        seed: of the shuffle; None keeps the order.
    """

    def __init__(self, total: int, per_shard: int, seed: int | None) -> None:
        self._total = total
        self._per_shard = per_shard
        self._order = None if seed is None else np.random.default_rng(seed).permutation(total)

    def __len__(self) -> int:
        return -(-self._total // self._per_shard)

    def piece(self, number: int, shards: Sequence[Shard], counts: NDArray[np.int64]) -> Piece:
        """Return the new shard of a number, from old shards and their numbers of samples."""
        start = number * self._per_shard
        end = min(start + self._per_shard, self._total)
        samples = np.arange(start, end) if self._order is None else self._order[start:end]
        places = np.searchsorted(np.cumsum(counts), samples, side="right")
        used, source = np.unique(places, return_inverse=True)
        return Piece(number, samples, [shards[place] for place in used], source)


def write_shard(piece: Piece, out: Path, plan: Path, prefixes: dict[Path, str]) -> None:
    """Write one new shard; it gets its name when it is whole and on disk."""
    rows = np.memmap(plan, dtype=ROW, mode="r")
    files: LRUCache[int] = LRUCache(_FILES_KEPT, dispose=os.close)
    try:
        with atomic_write(out / shard_name(piece.number), durable=True) as file:
            for sample, source in zip(piece.samples, piece.source):
                go_on()
                shard = piece.sources[source]
                handle = files.get(source, partial(os.open, shard.path, os.O_RDONLY))
                _copy(handle, rows[sample], prefixes.get(shard.folder, ""), file, str(shard))
            close_tar(file)
    finally:
        files.clear()


def folder_prefixes(folders: Sequence[Path]) -> dict[Path, str]:
    """Return a prefix for each folder's keys: as much of its path as no other one has.

    Raises:
        ConfigError: no part of the paths tells them apart.
    """
    parts = {folder: folder.resolve().parts[1:] for folder in folders}
    for length in range(1, max(map(len, parts.values())) + 1):
        names = {
            folder: "_".join(part[-length:]).replace(".", "_").replace(" ", "_") + "_"
            for folder, part in parts.items()
        }
        if len(set(names.values())) == len(names):
            return names
    raise ConfigError("--prefix-keys: the folders' names do not tell them apart; rename one")


def _survey(shard: Shard, prefixes: dict[Path, str]) -> Surveyed:
    prefix = prefixes.get(shard.folder, "")
    with ShardReader(shard.path) as opened:
        rows = sample_rows(opened.samples, [0] * len(opened))
        return Surveyed(rows, numbers_of(keys_in(opened, prefix)), opened.problem)


def _copy(handle: int, row: np.void, prefix: str, file: IO[bytes], where: str) -> None:
    start, length = int(row["start"]) * BLOCK, int(row["blocks"]) * BLOCK
    data = os.pread(handle, length, start)
    # A tar ends in an empty block: with one behind it, the part is a tar like any other.
    members, problem = members_in(BytesIO(data + bytes(BLOCK)), len(data) + BLOCK)
    samples = grouped(members)
    if not length or problem or len(samples) != 1:
        raise ConfigError(f"{where}: cannot be read at byte {start}; has it changed meanwhile?")
    for member in samples[0].files.values():
        content = data[member.offset : member.offset + member.size]
        append_member(file, prefixed(prefix, member.name), content)


def _sweep(out: Path) -> None:
    """Remove the unfinished shards of a killed run."""
    for leftover in out.glob("shard-[0-9]*.tar.tmp"):
        leftover.unlink(missing_ok=True)


def _refuse_others(out: Path, settings: dict[str, object]) -> None:
    """Refuse a folder that holds other shards than this command writes."""
    path = out / SETTINGS_NAME
    try:
        found = parse_json(path.read_bytes())
    except FileNotFoundError:
        if any(out.glob("*.tar")):
            raise ConfigError(f"{out}: holds shards already; choose another --out") from None
        return
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}); delete {out} to begin again") from error
    sources = settings["sources"]
    require_same_settings(out, {**found, "sources": sources}, settings, f"delete {out}")
    if found.get("sources") != sources:
        raise ConfigError(
            f"{out} was begun with other shards in these folders, or they were written "
            f"anew since: choose another --out, or delete {out}"
        )


def _settings(arguments: argparse.Namespace, shards: Sequence[Shard]) -> dict[str, object]:
    sources = blake2b(digest_size=16)
    for shard in shards:
        # The size alone would not do: tars are filled up to 10 KiB.
        size, time = _size_and_time(shard.path)
        sources.update(f"{shard.folder.resolve()}\0{shard.name}\0{size}\0{time}\0".encode())
    return {
        "version": RESHARD_VERSION,
        "folders": [str(folder.resolve()) for folder in arguments.folders],
        "sources": sources.hexdigest(),
        "samples_per_shard": arguments.samples_per_shard,
        "shuffle": arguments.shuffle,
        "prefix_keys": arguments.prefix_keys,
    }


def _size_and_time(path: Path) -> tuple[int, int]:
    if not path.is_file():
        return 0, 0
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _say_repeated(places: Iterable[tuple[Shard, str]]) -> str:
    found: dict[str, list[Shard]] = {}
    for shard, key in places:
        found.setdefault(key, []).append(shard)
    found = {key: shards for key, shards in found.items() if len(shards) > 1}
    remedy = "--prefix-keys tells the folders apart"
    if any(len({shard.folder for shard in shards}) < len(shards) for shards in found.values()):
        remedy = "a folder repeats its own keys: `verify` names them all"
    named = [f"{key} ({shards[0]}, {shards[1]})" for key, shards in list(found.items())[:_NAMED]]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"{len(found)} keys come more than once: {', '.join(named)}{more}; {remedy}"
