"""Shards without an index: drawn with replacement, read front to back, in webdataset's pipeline.

A sample may come twice in an epoch, or not at all. A resumed run starts at fresh shards, drawn by
(seed, samples consumed, rank and worker): it is not exactly resumable.
"""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import webdataset
from braceexpand import braceexpand
from torch.utils.data import IterableDataset, get_worker_info

from vlp.config import ConfigError
from vlp.data.pretrain.dataset import CaptionedSamples, Slot
from vlp.data.shards.remote import (
    DEFAULT_OUTAGES,
    OutageConfig,
    RemoteFolder,
    Unreachable,
    file_of,
    given_up,
    is_url,
    patiently,
)
from vlp.data.shards.sample_files import BadSample, DataError, RawSample, grouped, parse
from vlp.data.shards.tar import members_in, section
from vlp.data.stream.sampler import Element
from vlp.io import redacted

# So many shards in a row without one good sample are not the shards' fault.
_MOST_BAD_SHARDS = 16

Drawn = tuple[Element, RawSample | BadSample]


class ListedShards:
    """Shards by name: of a folder, a pattern like `cc/{00000..00331}.tar`, or a `.txt` list."""

    def __init__(self, path: str, outages: OutageConfig = DEFAULT_OUTAGES) -> None:
        self.outages = outages
        self.shards = [SimpleNamespace(name=name) for name in _names(path)]
        if not self.shards:
            raise ConfigError(f"{path}: names no shards (*.tar)")

    def path(self, shard: int) -> str:
        """Return what messages call a shard."""
        return redacted(self.shards[shard].name)

    def sha256(self) -> str:
        """Return a hash of the shards' names, wherever they lie."""
        names = [file_of(shard.name)[1] for shard in self.shards]
        return hashlib.sha256("\n".join(names).encode()).hexdigest()


class ResampledSamples(IterableDataset[Slot]):
    """One rank's endless slots, shared out among its workers; `buffer` samples are shuffled."""

    def __init__(
        self,
        sources: Sequence[ListedShards],
        weights: Sequence[float],
        samples: CaptionedSamples,
        buffer: int,
        start: tuple[int, int, int, int],  # seed, samples consumed, rank, ranks
    ) -> None:
        self.sources, self.samples, self.buffer, self.start = sources, samples, buffer, start
        self._shards = [(n, k) for n, one in enumerate(sources) for k in range(len(one.shards))]
        self._weights = [weights[source] for source, _ in self._shards]

    def __iter__(self) -> Iterator[Slot]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        seed, consumed, rank, ranks = self.start
        rng = random.Random(f"{seed} {consumed} {rank * workers + number} of {ranks * workers}")
        visits = range(rank * workers + number, 2**62, ranks * workers)
        shuffled = webdataset.shuffle(self.buffer, initial=self.buffer, rng=rng)
        for element, sample in webdataset.DataPipeline(partial(self._read, rng, visits), shuffled):
            yield self.samples.slot(consumed, element, sample)

    def _read(self, rng: random.Random, visits: range) -> Iterator[Drawn]:
        bad_shards, last = 0, ""
        for visit in visits:
            if bad_shards == _MOST_BAD_SHARDS:
                raise DataError(f"{bad_shards} shards in a row gave nothing, the last one: {last}")
            source, shard = rng.choices(self._shards, self._weights)[0]
            bad_shards, last = bad_shards + 1, self.sources[source].path(shard)
            for position, sample in enumerate(_samples(self.sources[source], shard)):
                if isinstance(sample, RawSample):
                    bad_shards = 0
                else:
                    last = str(sample)
                yield Element(source, shard, position, visit), sample


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
            raise ConfigError(f"{name}: name tars, as in cc/{{00000..00331}}.tar, or their folder")
        if not is_url(name) and not Path(name).is_file():
            raise ConfigError(f"{name}: there is no such shard")
    return names


def _samples(source: ListedShards, shard: int) -> Iterator[RawSample | BadSample]:
    """Yield the samples of a shard, and a bad one where it is damaged, empty or cannot be had."""
    name, told = source.shards[shard].name, source.path(shard)
    try:
        # A copy without a name: whatever ends this process, nothing of it stays behind.
        with tempfile.TemporaryFile() if is_url(name) else open(name, "rb") as file:
            if is_url(name):
                place, remote = file_of(name)
                target = f"/proc/self/fd/{file.fileno()}"
                fetch = partial(RemoteFolder(place, source.outages).fetch, remote, target)
                patiently(fetch, source.outages.seconds, told)
            size = os.fstat(file.fileno()).st_size
            members, problem = members_in(section(file.fileno(), 0, size), size)
            for sample in grouped(members):
                try:
                    yield parse(
                        sample,
                        lambda m: os.pread(file.fileno(), m.size, m.offset),
                        f"{told}, {sample.key}",
                    )
                except BadSample as bad:
                    yield bad
            if problem or not members:
                yield BadSample("corrupt shard", f"{told} ({problem or 'it holds nothing'})")
    except (OSError, Unreachable) as error:
        missing = BadSample("missing shard", f"{told} ({error})")
        if is_url(name) and source.outages.policy != "skip":
            down = isinstance(error, Unreachable)
            raise given_up(missing, source.outages.policy, down) from error
        yield missing
