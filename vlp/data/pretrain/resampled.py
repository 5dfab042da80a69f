"""An endless stream of what has no index: shards drawn with replacement, each read front to back.

What a run sees depends on (seed, rank, ranks, workers) and on where it started; a sample may come
twice in an epoch, or not at all. It is not exactly resumable: a resumed run starts at fresh shards,
drawn by (seed, samples consumed). With an index, the training order has none of these limits.

The stages are written here rather than with webdataset's pipeline: a damaged shard or sample is
counted with its place instead of being passed over, each source has a weight, and remote shards
come through fsspec with retries.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from braceexpand import braceexpand
from torch.utils.data import IterableDataset, get_worker_info

from vlp.config import ConfigError
from vlp.data.pretrain.dataset import CaptionedSamples, Slot
from vlp.data.shards.bad_samples import DataError
from vlp.data.shards.file_section import section
from vlp.data.shards.outages import DEFAULT_OUTAGES, OutageConfig, Unreachable, given_up, patiently
from vlp.data.shards.remote import RemoteFolder, file_of, is_url
from vlp.data.shards.sample_files import BadSample, RawSample, grouped, parse
from vlp.data.shards.tar import Member, members_in
from vlp.data.stream.rng import make_rng
from vlp.data.stream.sampler import Element
from vlp.io import redacted

# So many different shards in a row without one good sample are not the shards' fault.
_MOST_BAD_SHARDS = 16

Value = TypeVar("Value")


class ListedShards:
    """Shards by name alone, in the place of a `ShardIndex` whose samples are read elsewhere.

    Args:
        path: a folder of *.tar files; one tar, or several as in `cc/{00000..00331}.tar`; or a
            `.txt` file with one of these in each line. Tars may be URLs.
        outages: what to do when the store of a URL fails.

    Raises:
        ConfigError: it names nothing.
    """

    def __init__(self, path: str, outages: OutageConfig = DEFAULT_OUTAGES) -> None:
        self.folder, self.outages = _Anywhere(), outages
        self.shards = [_Named(name) for name in _names(path)]
        if not self.shards:
            raise ConfigError(f"{path}: names no shards (*.tar)")

    def sha256(self) -> str:
        """Return a hash of the shards' names, wherever they lie."""
        names = [file_of(shard.name)[1] for shard in self.shards]
        return hashlib.sha256("\n".join(names).encode()).hexdigest()


class ResampledSamples(IterableDataset[Slot]):
    """One rank's endless slots, shared out among its workers.

    Args:
        sources: the shards.
        weights: how often samples of each source come, beside one of weight 1.
        samples: makes slots of what `sources` hold.
        buffer: samples of each worker among which the next one is drawn.
        seed: of the run.
        consumed: samples before this start of the run.
        rank: whose slots.
        world_size: number of ranks.
        folder: where a shard of a URL lies while it is read; None is the system's temporary one.
    """

    def __init__(
        self,
        sources: Sequence[ListedShards],
        weights: Sequence[float],
        samples: CaptionedSamples,
        buffer: int,
        seed: int,
        consumed: int,
        rank: int,
        world_size: int,
        folder: str | None = None,
    ) -> None:
        self.sources, self.samples, self.buffer, self.seed = sources, samples, buffer, seed
        self.consumed, self.rank, self.world_size = consumed, rank, world_size
        self.folder = folder
        counts = [weight * len(source.shards) for source, weight in zip(sources, weights)]
        self._chances = [count / sum(counts) for count in counts]

    def __iter__(self) -> Iterator[Slot]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        readers = self.world_size * workers
        reader = self.rank * workers + number
        rng = make_rng(self.seed, self.consumed, f"{reader} of {readers}", "resampled")
        kept: list[tuple[Element, RawSample | BadSample]] = []
        for new in self._read(rng, reader, readers):
            if len(kept) < self.buffer:
                kept.append(new)
                continue
            place = int(rng.integers(len(kept)))
            (element, sample), kept[place] = kept[place], new
            yield self.samples.slot(self.consumed, element, sample)

    def _read(
        self, rng: np.random.Generator, reader: int, readers: int
    ) -> Iterator[tuple[Element, RawSample | BadSample]]:
        """Yield samples in the order of their shards; `visit` numbers the draws of shards."""
        coming, visit, bad_shards = self._ask(rng), reader, 0
        while bad_shards < _MOST_BAD_SHARDS:
            (source, shard, opened), coming = coming, self._ask(rng)
            name = self.sources[source].shards[shard].name
            bad_shards += 1
            last: object = name
            for position, sample in enumerate(_samples(name, opened())):
                if isinstance(sample, RawSample):
                    bad_shards = 0
                last = sample
                yield Element(source, shard, position, visit), sample
            visit += readers
        raise DataError(f"{_MOST_BAD_SHARDS} shards in a row gave nothing, the last one: {last}")

    def _ask(self, rng: np.random.Generator) -> tuple[int, int, Callable[[], int | BadSample]]:
        """Return a shard, on its way here while another one is read."""
        source = int(rng.choice(len(self.sources), p=self._chances))
        shard = int(rng.integers(len(self.sources[source].shards)))
        name = self.sources[source].shards[shard].name
        outages = self.sources[source].outages
        return source, shard, _in_background(lambda: _open(name, self.folder, outages))


class _Named(NamedTuple):
    name: str


class _Anywhere:
    """The folder of shards whose names say all."""

    def __truediv__(self, name: str) -> str:
        return redacted(name)


def _names(path: str) -> list[str]:
    if path.endswith(".txt") and not is_url(path):
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot read this list of shards ({error})") from error
        return [name for line in lines if line.strip() for name in _names(line.strip())]
    if not is_url(path) and Path(path).is_dir():
        return sorted(str(file) for file in Path(path).glob("*.tar"))
    try:
        names = list(braceexpand(path))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    for place in {file_of(name)[0] for name in names if is_url(name)}:
        RemoteFolder(place)  # complains now when nothing can read it
    for name in names:
        if not (file_of(name)[1] if is_url(name) else name).endswith(".tar"):
            raise ConfigError(
                f"{name}: with data.sampler resampled, name tars, as in cc/{{00000..00331}}.tar, a "
                "folder of them, or a .txt file that lists them"
            )
        if not is_url(name) and not Path(name).is_file():
            raise ConfigError(f"{name}: there is no such shard")
    return names


def _open(name: str, folder: str | None, outages: OutageConfig) -> int | BadSample:
    """Open a shard; of a URL, a fetched copy that lies there as long as it is open.

    Raises:
        DataError: the store does not give it, and its samples are not to be dropped.
    """
    if not is_url(name):
        try:
            return os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            return BadSample("missing shard", f"{name} ({error.strerror})")
    place, file = file_of(name)
    try:
        # Without a name from the start: whatever ends this process, nothing of it stays behind.
        with tempfile.TemporaryFile(dir=folder) as copy:
            target = f"/proc/self/fd/{copy.fileno()}"
            fetch = partial(RemoteFolder(place, outages).fetch, file, target)
            patiently(fetch, outages.seconds, redacted(name))
            return os.dup(copy.fileno())
    except (OSError, Unreachable) as error:
        bad = BadSample("missing shard", f"{name} ({error})")
        if outages.policy == "skip":
            return bad
        raise given_up(bad, outages.policy, isinstance(error, Unreachable)) from error


def _in_background(work: Callable[[], Value]) -> Callable[[], Value]:
    """Start some work; the value that is returned waits for its result.

    The thread ends with the process, which an executor's would hold up until a download is done.
    """
    done: Future[Value] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result


def _samples(name: str, opened: int | BadSample) -> Iterator[RawSample | BadSample]:
    """Yield the samples of a shard, and one more that says so where it is damaged or holds none."""
    if isinstance(opened, BadSample):
        yield opened
        return
    try:
        size = os.fstat(opened).st_size
        members, problem = members_in(section(opened, 0, size), size)

        def read(member: Member) -> bytes:
            return os.pread(opened, member.size, member.offset)

        for sample in grouped(members):
            try:
                yield parse(sample, read, f"{name}, {sample.key}")
            except BadSample as bad:
                yield bad
        if problem or not members:
            yield BadSample("corrupt shard", f"{name} ({problem or 'it holds nothing'})")
    except OSError as error:
        yield BadSample("missing shard", f"{name} ({error.strerror})")
    finally:
        os.close(opened)
