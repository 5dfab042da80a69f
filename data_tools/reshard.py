"""`vlp data reshard`: the samples of shards in new shards of another size or order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm
from typer import Option

from data_tools.builder.write_shard import require_same_settings
from data_tools.executor import Executor, raise_if_stopped
from data_tools.options import Folders, N, Out, WorkerOptions, require_positive
from data_tools.shards import (
    NameHashes,
    Shard,
    ShardReader,
    find_repeated,
    hash_names,
    repeated_keys,
    scan,
    shards_of,
)
from vlp.config import ConfigError
from vlp.data.shards.index import BLOCK, ROW, index_folder, require_single_split, sample_rows
from vlp.data.shards.sample_files import ShardFile
from vlp.data.shards.shard_writer import shard_name
from vlp.data.shards.tar import append_member, close_tar, open_tar
from vlp.io import atomic_write, parse_json, write_json
from vlp.lock import FolderLock

RESHARD_VERSION = 1  # raised whenever equal arguments give other shards
SETTINGS_NAME = "reshard.json"
_ROWS_NAME = "reshard.places"  # a temporary file with a ROW per sample
_MAX_EXAMPLES = 5


class NewShard(NamedTuple):
    """A shard to write: its samples' indices among all, and their old shards."""

    number: int
    samples: NDArray[np.int64]
    old_shards: list[Shard]
    shard_of_sample: NDArray[np.int64]  # index in `old_shards`

    def __str__(self) -> str:
        return shard_name(self.number)


def reshard(
    folders: Folders,
    out: Out,
    samples_per_shard: Annotated[int, N(help="of the new shards")],
    workers: WorkerOptions,
    shuffle: Annotated[
        int | None, Option(metavar="SEED", help="shuffle all samples (default: keep their order)")
    ] = None,
) -> int:
    """Write the samples of folders of shards into new shards of another size, or in another order.

        vlp data reshard shards/coco/train shards/cc3m --out shards/both \\
            --samples-per-shard 1000 --shuffle 0

    All files of samples are copied byte for byte; the headers of the tars have no times and users.
    Files without a dot in their name, which belong to no sample, are left out.

    After an interruption run the same command again: finished shards stay, and the result is the
    same. Of a damaged shard the samples before the damage are copied; the exit code is then 1. A
    sample needs 10 bytes of disk during the command, and 8 bytes of memory, 16 with --shuffle.
    """
    require_positive(samples_per_shard=samples_per_shard)
    shards, executor = shards_of(folders), workers.workers()
    for folder in folders:
        require_single_split(folder, [shard.name for shard in shards if shard.folder == folder])
    if out.resolve() in {folder.resolve() for folder in folders}:
        raise ConfigError(f"{out}: is one of the folders to read; choose another --out")
    settings = {
        "version": RESHARD_VERSION,
        "folders": [str(folder.resolve()) for folder in folders],
        "shards (places, sizes and times)": _digest_shards(shards),
        "samples_per_shard": samples_per_shard,
        "shuffle": shuffle,
    }
    with FolderLock(out):
        _check_folder(out, settings)
        rows_path = out / _ROWS_NAME
        try:
            problems, counts = write_rows(shards, rows_path, executor)
            total = int(counts.sum())
            if not total:
                raise ConfigError("there are no samples in these folders")
            write_json(out / SETTINGS_NAME, settings, error=ConfigError)
            for leftover in out.glob("shard-[0-9]*.tar.tmp"):  # of a killed run
                leftover.unlink(missing_ok=True)
            num_shards = -(-total // samples_per_shard)
            missing = [n for n in range(num_shards) if not (out / shard_name(n)).exists()]
            jobs = new_shards(missing, samples_per_shard, shuffle, shards, counts)
            write = partial(write_shard, out=out, rows_path=rows_path)
            with tqdm(total=len(missing), desc=str(out), unit="shard") as bar:
                for _ in executor.map(write, jobs):
                    bar.update()
        except OSError as error:
            raise ConfigError(
                f"{error.filename or out}: {error.strerror}; finished shards stay, run the same "
                "command again to go on"
            ) from error
        finally:
            rows_path.unlink(missing_ok=True)
        index_folder(out, executor.map)
    print(f"{out}: {total} samples in {num_shards} shards, {len(missing)} of them new")
    for problem in problems:
        print(f"  damaged: {problem}")
    return 1 if problems else 0


def write_rows(
    shards: Sequence[Shard], path: Path, executor: Executor
) -> tuple[list[str], NDArray[np.int64]]:
    """Write a ROW with the location of each sample; return damage, and samples per shard."""
    problems, counts = [], []
    hashes: list[NameHashes] = []
    with open(path, "wb") as file:
        for shard, (rows, key_hashes, problem) in scan(_survey, shards, executor, "survey"):
            if problem:
                problems.append(f"{shard}: {problem}, {len(rows)} samples before it")
            counts.append(len(rows))
            hashes.append(key_hashes)
            file.write(rows.tobytes())
    _, duplicates = find_repeated(hashes)
    if len(duplicates):
        raise ConfigError(_describe_repeated(repeated_keys(shards, duplicates, executor)))
    return problems, np.array(counts, dtype=np.int64)


def new_shards(
    numbers: Iterable[int],
    per_shard: int,
    seed: int | None,
    shards: Sequence[Shard],
    counts: NDArray[np.int64],
) -> Iterator[NewShard]:
    """Yield new shards by number; samples are in the old shards' order, or shuffled by `seed`."""
    ends = np.cumsum(counts)
    total = int(ends[-1])
    order = None if seed is None else np.random.default_rng(seed).permutation(total)
    for number in numbers:
        start = number * per_shard
        end = min(start + per_shard, total)
        samples = np.arange(start, end) if order is None else order[start:end]
        shard_numbers = np.searchsorted(ends, samples, side="right")
        old_numbers, shard_of_sample = np.unique(shard_numbers, return_inverse=True)
        yield NewShard(number, samples, [shards[old] for old in old_numbers], shard_of_sample)


def write_shard(shard: NewShard, out: Path, rows_path: Path) -> None:
    """Write a new shard, atomically."""
    rows = np.memmap(rows_path, dtype=ROW, mode="r")
    with atomic_write(out / shard_name(shard.number), durable=True) as file:
        for sample, index in zip(shard.samples, shard.shard_of_sample):
            raise_if_stopped()
            _copy(shard.old_shards[index], rows[sample], file)
        close_tar(file)


def _survey(shard: Shard) -> tuple[NDArray[np.void], NameHashes, str | None]:
    """Return a shard's ROWs (without captions), hashes of its keys, and its damage."""
    with ShardReader(shard.path) as reader:
        rows = sample_rows(reader.samples, [0] * len(reader.samples))
        problem = reader.problem or (None if len(rows) else "empty")
        return rows, hash_names(reader.keys), problem


def _copy(shard: Shard, row: np.void, file: IO[bytes]) -> None:
    """Append the files of the sample at a ROW of an old shard."""
    start, length = int(row["start"]) * BLOCK, int(row["blocks"]) * BLOCK
    with ShardFile(open_tar(shard.path), shard.path) as source:
        (samples, problem, _), read = source.samples_at(start, length)
        if not length or problem or len(samples) != 1:
            raise ConfigError(
                f"{shard}: no sample at byte {start}: it has changed; run the command again"
            )
        for member in samples[0].files.values():
            append_member(file, member.name, read(member))


def _check_folder(out: Path, settings: dict[str, object]) -> None:
    """Refuse a folder with shards of another command or of other settings."""
    path = out / SETTINGS_NAME
    try:
        stored = parse_json(path.read_bytes())
    except FileNotFoundError:
        if any(out.glob("*.tar")):
            raise ConfigError(f"{out}: holds shards already; choose another --out") from None
        return
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}); delete {out} to begin again") from error
    require_same_settings(out, stored, settings, f"delete {out}")


def _digest_shards(shards: Sequence[Shard]) -> str:
    digest = blake2b(digest_size=16)
    for shard in shards:
        # With the time: changed tars often have the same size, as they are padded to 10 KiB.
        status = shard.path.stat() if shard.path.is_file() else None
        size, time = (0, 0) if status is None else (status.st_size, status.st_mtime_ns)
        digest.update(f"{shard.folder.resolve()}\0{shard.name}\0{size}\0{time}\0".encode())
    return digest.hexdigest()


def _describe_repeated(occurrences: Iterable[tuple[Shard, str]]) -> str:
    shards_by_key: dict[str, list[Shard]] = {}
    for shard, key in occurrences:
        shards_by_key.setdefault(key, []).append(shard)
    examples = [
        f"{key} ({shards[0]}, {shards[1]})"
        for key, shards in shards_by_key.items()
        if len(shards) > 1
    ]
    rest = len(examples) - _MAX_EXAMPLES
    more = f" and {rest} more" if rest > 0 else ""
    listing = ", ".join(examples[:_MAX_EXAMPLES])
    return f"{len(examples)} keys are not unique: {listing}{more}"
