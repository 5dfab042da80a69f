"""New shards of another size or order from the samples of others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm
from typer import Option

from data_tools.builder.write_shard import require_same_settings, shard_name
from data_tools.executor import Executor, go_on
from data_tools.options import Folders, N, Out, WorkerOptions, at_least_1
from data_tools.shards import (
    Numbers,
    Shard,
    ShardReader,
    keys_in,
    numbers_of,
    repeated,
    repeated_keys,
    scan,
    shards_of,
)
from vlp.config import ConfigError
from vlp.data.shards.index import BLOCK, ROW, index_folder, require_single_split, sample_rows
from vlp.data.shards.sample_files import ShardFile
from vlp.data.shards.tar import append_member, close_tar, open_tar
from vlp.io import atomic_write, parse_json, write_json
from vlp.lock import FolderLock

RESHARD_VERSION = 1  # raised whenever equal arguments give other shards
SETTINGS_NAME = "reshard.json"
_PLAN_NAME = "reshard.places"
_MOST_EXAMPLES = 5


class Surveyed(NamedTuple):
    """Survey of a shard: places of its samples, numbers of their keys, the problem behind them."""

    rows: NDArray[np.void]
    keys: Numbers
    problem: str | None


class Piece(NamedTuple):
    """One new shard: its samples' numbers and sources."""

    number: int
    samples: NDArray[np.int64]
    sources: list[Shard]
    # Each sample's index in `sources`.
    source: NDArray[np.int64]

    def __str__(self) -> str:
        return shard_name(self.number)


def reshard(
    folders: Folders,
    out: Out,
    samples_per_shard: Annotated[int, N(help="of the new shards")],
    workers: WorkerOptions,
    shuffle: Annotated[
        int | None, Option(metavar="SEED", help="deal all samples anew (default: keep order)")
    ] = None,
) -> int:
    """Deal the samples of folders of shards into new shards of another size, or in another order.

        python -m data_tools reshard shards/coco/train shards/cc3m --out shards/both \\
            --samples-per-shard 1000 --shuffle 0

    Every file of every sample is kept, byte for byte; only the tar's headers are written anew,
    without times and users. Files that belong to no sample (no dot in their name) are left behind.

    After an interruption run the same command again: finished shards stay, and the result is the
    same. A damaged shard gives what lies before the damage; the exit code is then 1. Needs 10 bytes
    of disk a sample while it runs, and 8 bytes of memory, 16 with --shuffle.
    """
    at_least_1(samples_per_shard=samples_per_shard)
    shards, executor = shards_of(folders), workers.workers()
    for folder in folders:
        require_single_split(folder, [shard.name for shard in shards if shard.folder == folder])
    if out.resolve() in {folder.resolve() for folder in folders}:
        raise ConfigError(f"{out}: is read from; choose another --out")
    settings = {
        "version": RESHARD_VERSION,
        "folders": [str(folder.resolve()) for folder in folders],
        "shards (places, sizes and times)": _digest(shards),
        "samples_per_shard": samples_per_shard,
        "shuffle": shuffle,
    }
    with FolderLock(out):
        _refuse_others(out, settings)
        plan = out / _PLAN_NAME
        try:
            problems, counts = survey(shards, plan, executor)
            total = int(counts.sum())
            if not total:
                raise ConfigError("there are no samples in these folders")
            write_json(out / SETTINGS_NAME, settings, error=ConfigError)
            for leftover in out.glob("shard-[0-9]*.tar.tmp"):  # of a killed run
                leftover.unlink(missing_ok=True)
            order = Order(total, samples_per_shard, shuffle)
            missing = [n for n in range(len(order)) if not (out / shard_name(n)).exists()]
            pieces = (order.piece(number, shards, counts) for number in missing)
            write = partial(write_shard, out=out, plan=plan)
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
    shards: Sequence[Shard], plan: Path, executor: Executor
) -> tuple[list[str], NDArray[np.int64]]:
    """Write the places of all samples, one ROW each; return problems and each shard's samples."""
    problems, counts = [], []
    keys: list[Numbers] = []
    with open(plan, "wb") as file:
        for shard, surveyed in scan(_survey, shards, executor, "survey"):
            if surveyed.problem:
                problems.append(
                    f"{shard}: {surveyed.problem}, {len(surveyed.rows)} samples before it"
                )
            counts.append(len(surveyed.rows))
            keys.append(surveyed.keys)
            file.write(surveyed.rows.tobytes())
    duplicates = repeated(keys).values
    if len(duplicates):
        raise ConfigError(_say_repeated(repeated_keys(shards, duplicates, executor)))
    return problems, np.array(counts, dtype=np.int64)


class Order:
    """Assignment of samples to new shards; without a seed of the shuffle they keep their order."""

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
        shard_numbers = np.searchsorted(np.cumsum(counts), samples, side="right")
        used, source = np.unique(shard_numbers, return_inverse=True)
        return Piece(number, samples, [shards[index] for index in used], source)


def write_shard(piece: Piece, out: Path, plan: Path) -> None:
    """Write one new shard; it gets its name when it is whole and on disk."""
    rows = np.memmap(plan, dtype=ROW, mode="r")
    with atomic_write(out / shard_name(piece.number), durable=True) as file:
        for sample, source in zip(piece.samples, piece.source):
            go_on()
            _copy(piece.sources[source], rows[sample], file)
        close_tar(file)


def _survey(shard: Shard) -> Surveyed:
    with ShardReader(shard.path) as opened:
        rows = sample_rows(opened.samples, [0] * len(opened))
        problem = opened.problem or (None if len(rows) else "empty")
        return Surveyed(rows, numbers_of(keys_in(opened)), problem)


def _copy(shard: Shard, row: np.void, file: IO[bytes]) -> None:
    start, length = int(row["start"]) * BLOCK, int(row["blocks"]) * BLOCK
    with ShardFile(open_tar(shard.path), shard.path) as source:
        (samples, problem, _), read = source.samples_at(start, length)
        if not length or problem or len(samples) != 1:
            raise ConfigError(f"{shard}: cannot be read at byte {start}; has it changed meanwhile?")
        for member in samples[0].files.values():
            append_member(file, member.name, read(member))


def _refuse_others(out: Path, settings: dict[str, object]) -> None:
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


def _digest(shards: Sequence[Shard]) -> str:
    sources = blake2b(digest_size=16)
    for shard in shards:
        # The size alone would not do: tars are filled up to 10 KiB.
        status = shard.path.stat() if shard.path.is_file() else None
        size, time = (0, 0) if status is None else (status.st_size, status.st_mtime_ns)
        sources.update(f"{shard.folder.resolve()}\0{shard.name}\0{size}\0{time}\0".encode())
    return sources.hexdigest()


def _say_repeated(occurrences: Iterable[tuple[Shard, str]]) -> str:
    shards_by_key: dict[str, list[Shard]] = {}
    for shard, key in occurrences:
        shards_by_key.setdefault(key, []).append(shard)
    shards_by_key = {key: shards for key, shards in shards_by_key.items() if len(shards) > 1}
    examples = [
        f"{key} ({shards[0]}, {shards[1]})"
        for key, shards in list(shards_by_key.items())[:_MOST_EXAMPLES]
    ]
    more = (
        f" and {len(shards_by_key) - _MOST_EXAMPLES} more"
        if len(shards_by_key) > _MOST_EXAMPLES
        else ""
    )
    return f"{len(shards_by_key)} keys come more than once: {', '.join(examples)}{more}"
