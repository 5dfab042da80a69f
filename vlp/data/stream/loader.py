"""Loading of batches by worker processes, in an order independent of ranks and workers."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from vlp.config import Config
from vlp.data.file_names import is_hidden
from vlp.data.shards.remote import retries, share_retries
from vlp.data.shards.sample_files import BadSample, DataError, SkippedSample
from vlp.data.stream.batch import RankBatch
from vlp.data.stream.rng import make_rng
from vlp.data.stream.sampler import (
    EndlessSampler,
    GlobalBatch,
    Request,
    Source,
    TrainingSampler,
    require_equal_streams,
)
from vlp.signals import STOP_SIGNALS, end_with_parent


def worker_settings(workers: int, prefetch: int) -> dict[str, Any]:
    """Return DataLoader arguments; workers ignore signals and prefetch `prefetch` batches each."""
    if not workers:
        return {"num_workers": 0}
    return {
        "num_workers": workers,
        "prefetch_factor": prefetch,
        "worker_init_fn": partial(_prepare_worker, os.getpid(), retries()),
    }


@contextmanager
def open_loader(loader: DataLoader[Any]) -> Iterator[Iterator[Any]]:
    """Yield an iterator over a loader's batches; its workers end with the context."""
    batches = iter(loader)
    # atexit, as a generator that an exception leaves unclosed must not leave workers behind.
    shut_down = getattr(batches, "_shutdown_workers", None)
    if shut_down is not None:
        atexit.register(shut_down)
    for worker in getattr(batches, "_workers", ()):
        # PyTorch terminates workers that do not end, as in an outage; ours ignore SIGTERM.
        worker.terminate = worker.kill
    try:
        yield batches
    finally:
        if shut_down is not None:
            atexit.unregister(shut_down)
            shut_down()


def _prepare_worker(parent: int, retry_counter: Any, worker: int) -> None:
    share_retries(retry_counter)
    # Ctrl-C and a scheduler's SIGTERM reach every process of the job. The main process reacts by a
    # checkpoint and then stops its workers. If it dies, they die too: they inherit the lock of the
    # run's folder, which must end with it.
    for signal_number in STOP_SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)
    if os.getppid() == parent:
        end_with_parent(signal.SIGKILL, parent)
    else:  # the parent is a fork server, which lives as long as its workers
        threading.Thread(target=_end_with_main_process, daemon=True).start()


def _end_with_main_process() -> None:
    main_process = multiprocessing.parent_process()
    if main_process is not None:
        main_process.join()
        os.kill(os.getpid(), signal.SIGKILL)


Prefetch = Callable[[int, int], object]  # (source, shard), called in a worker


class BatchRequest(NamedTuple):
    """A rank's rows of a batch, and the (source, shard) pairs to prefetch meanwhile."""

    rows: list[Request]
    prefetch: list[tuple[int, int]]


@dataclass(frozen=True)
class ShardAwareBatchSampler:
    """Batch sampler of a rank's requests; `fetchers` workers share the prefetching, 0: none."""

    sampler: TrainingSampler
    batch: int
    consumed: int
    rank: int
    world_size: int
    stop_after: int | None
    fetchers: int

    def __iter__(self) -> Iterator[BatchRequest]:
        batches = self.sampler.global_batches(self.consumed, self.batch)
        prefetch_lists = self.prefetch_lists() if self.fetchers else repeat(list[Any]())
        for batch, prefetch in zip(islice(batches, self.stop_after), prefetch_lists):
            indices = self.sampler.rows(
                batch.epoch, batch.start, self.batch, self.rank, self.world_size
            )
            yield BatchRequest([Request(batch.epoch, index) for index in indices], prefetch)

    def prefetch_lists(self) -> Iterator[list[tuple[int, int]]]:
        """Yield each batch's shards to prefetch; a unit's shards are spread over batches."""
        waiting: deque[tuple[int, int]] = deque()
        last_unit, per_batch = (-1, 0), 0
        for batch in self.sampler.global_batches(self.consumed, self.batch):
            if not waiting:
                per_batch = 0
            for unit in self._units(batch):
                if unit > last_unit:
                    waiting.extend(self.sampler.shards_of_unit(*unit, self.rank, self.world_size))
                    last_unit = unit
            # Workers get batches in turn, so that all of them fetch an equal part.
            per_batch = max(per_batch, -(-len(waiting) // self.fetchers))
            yield [waiting.popleft() for _ in range(min(per_batch, len(waiting)))]

    def _units(self, batch: GlobalBatch) -> list[tuple[int, int]]:
        """Return (epoch, number) of the prefetch units that a batch reads, and of the next one."""
        end = batch.start + self.batch // self.sampler.streams
        length = self.sampler.prefetch_unit
        stop = min(-(-end // length), self.sampler.units_in_epoch(batch.epoch))
        units = [(batch.epoch, number) for number in range(batch.start // length, stop)]
        return [*units, self._next_unit(*units[-1])]

    def _next_unit(self, epoch: int, number: int) -> tuple[int, int]:
        if number + 1 < self.sampler.units_in_epoch(epoch):
            return epoch, number + 1
        epoch += 1
        while not self.sampler.samples_in_epoch(epoch):
            epoch += 1
        return epoch, 0


def concurrent_shards(
    sampler: TrainingSampler, batch: int, consumed: int, rank: int, world_size: int
) -> set[tuple[int, int]]:
    """Return the (source, shard) pairs of a rank's current and next prefetch units."""
    requests = ShardAwareBatchSampler(sampler, batch, consumed, rank, world_size, None, fetchers=1)
    return set(next(requests.prefetch_lists()))  # one fetcher gets both units with its first batch


class BatchDataset(Dataset[Any]):
    """Dataset that maps a `BatchRequest` to rows and prefetches shards."""

    def __init__(self, samples: Dataset[Any], prefetch: Prefetch | None) -> None:
        self.samples, self.prefetch = samples, prefetch

    def __getitems__(self, request: BatchRequest) -> list[Any]:
        """Return all rows of a batch; `DataLoader` calls it with the batch sampler's request."""
        if self.prefetch is not None:
            for source, shard in request.prefetch:
                self.prefetch(source, shard)
        get_items = getattr(self.samples, "__getitems__", None)
        if get_items is not None:
            return get_items(request.rows)
        return [self.samples[row] for row in request.rows]


class OrderedData:
    """Batches in the order of a sampler, the same for any number of ranks and workers.

    `samples` maps a `Request` to a sample, `collate` a rank's samples to `batch.RankBatch`; `batch`
    counts the rows of all ranks. A larger share of bad samples in an epoch than
    `max_skipped_share` ends the run.
    """

    def __init__(
        self,
        sampler: TrainingSampler | EndlessSampler,
        samples: Dataset[Any],
        collate: Callable[[list[Any]], RankBatch],
        batch: int,
        workers: int = 0,
        max_skipped_share: float = 0.5,
        prefetch: Prefetch | None = None,
    ) -> None:
        self.sampler, self.samples, self.collate = sampler, samples, collate
        self.prefetch = prefetch
        self.batch, self.workers, self.max_skipped_share = batch, workers, max_skipped_share
        sampler.batches_in_epoch(0, batch)  # raises if the batch is no multiple of the streams
        # Hashes of the parts of the data, equal for equal data in any folder.
        self.fingerprint = {"samples of an epoch": f"{sampler.samples_in_epoch(0)}"}

    def samples_in_epoch(self, epoch: int) -> int:
        """Return the number of samples of one epoch over all ranks (pairs with `captions: all`)."""
        return self.sampler.samples_in_epoch(epoch)

    def batches_in_epoch(self, epoch: int) -> int:
        """Return the number of global batches of one epoch."""
        return self.sampler.batches_in_epoch(epoch, self.batch)

    def batches_left(self, samples_consumed: int, epochs: int) -> int:
        """Return the number of global batches from `samples_consumed` to the end of `epochs`."""
        current, _ = self.sampler.locate(samples_consumed)
        if current >= epochs:
            return 0
        batches = self.sampler.global_batches(samples_consumed, self.batch)
        left = sum(1 for _ in takewhile(lambda batch: batch.epoch == current, batches))
        return left + sum(map(self.batches_in_epoch, range(current + 1, epochs)))

    def batches(
        self,
        samples_consumed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        stop_after: int | None = None,
    ) -> Generator[tuple[Any, int], None, None]:
        """Yield a rank's share of each global batch, and the samples consumed by all ranks.

        `stop_after` limits the number of batches; None: endless. The number of ranks divides
        `canonical_streams`. DataError if too many samples are bad.
        """
        # Both raise ConfigError now instead of in the generator.
        self.sampler.locate(samples_consumed)
        self.sampler.samples_of_rank(0, rank, world_size)
        loader = self._loader(samples_consumed, rank, world_size, stop_after)
        global_batches = self.sampler.global_batches(samples_consumed, self.batch)
        watch = SkippedShareWatch(self.sampler, self.max_skipped_share, rank, world_size)
        return _checked_batches(loader, islice(global_batches, stop_after), watch)

    def _loader(
        self, consumed: int, rank: int, world_size: int, stop_after: int | None
    ) -> DataLoader[Any]:
        assert isinstance(self.sampler, TrainingSampler)
        fetchers = 0 if self.prefetch is None else max(self.workers, 1)
        requests = ShardAwareBatchSampler(
            self.sampler, self.batch, consumed, rank, world_size, stop_after, fetchers
        )
        return DataLoader(
            BatchDataset(self.samples, self.prefetch),
            batch_sampler=requests,  # type: ignore[arg-type]  # yields `BatchRequest`, not lists
            **self._settings(),
        )

    def _settings(self) -> dict[str, Any]:
        return {
            "collate_fn": self.collate,
            "pin_memory": torch.cuda.is_available(),
            **worker_settings(self.workers, prefetch=4),
        }


def _checked_batches(
    loader: DataLoader[Any], global_batches: Iterator[GlobalBatch], watch: SkippedShareWatch
) -> Generator[tuple[Any, int], None, None]:
    try:
        with open_loader(loader) as batches:
            for global_batch, batch in zip(global_batches, batches):
                watch.update(global_batch.epoch, batch)
                yield batch, global_batch.consumed
    except DataError as error:
        raise type(error)(error.plain_message) from error


# Bad samples in a row that end a run: half an epoch of a billion samples would be too late.
_MAX_IN_A_ROW = 10_000


class SkippedShareWatch:
    """Watch that raises if over `max_share` of a rank's samples of an epoch are bad."""

    def __init__(
        self,
        sampler: TrainingSampler | EndlessSampler,
        max_share: float,
        rank: int,
        world_size: int,
    ) -> None:
        self._sampler = sampler
        self._max_share = max_share
        self._rank_and_size = rank, world_size
        self._epoch = -1
        self._expected = self._bad = self._bad_in_a_row = 0
        self._last = SkippedSample("", "")

    def update(self, epoch: int, batch: RankBatch) -> None:
        """Count a batch; DataError if too many samples of an epoch or in a row are bad."""
        if epoch != self._epoch:
            self._end_epoch()
            self._epoch = epoch
            self._expected = self._sampler.samples_of_rank(epoch, *self._rank_and_size)
            self._bad = 0
        good, bad = int(batch.valid.sum()), len(batch.skipped)
        self._bad += bad
        self._bad_in_a_row = 0 if good else self._bad_in_a_row + bad
        if not bad:
            return
        self._last = batch.skipped[-1]
        if self._bad > self._max_share * self._expected:
            raise DataError(
                f"{self._bad} of {self._expected} samples of epoch {epoch} are bad, more than "
                f"{self._max_share:.0%} of them; {self._last_skip()}"
            )
        if self._bad_in_a_row > _MAX_IN_A_ROW:
            raise DataError(f"{self._bad_in_a_row} samples in a row are bad; {self._last_skip()}")

    def _end_epoch(self) -> None:
        # `_expected` is of the whole epoch: a resumed run may see its last samples only, all bad.
        if 0 < self._expected <= self._bad:
            raise DataError(
                f"nothing is left of epoch {self._epoch}: all of its {self._bad} samples are bad; "
                f"{self._last_skip()}"
            )

    def _last_skip(self) -> str:
        return f"the last one: {self._last.kind}, {self._last.where}"


class CopyStream:
    """Mover of batches to `device`; to a GPU on a separate CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def move(self, batch: RankBatch) -> RankBatch:
        """Return the batch with every tensor on the device."""
        if self._stream is None or not isinstance(batch, tuple):
            return batch.to(self._device)
        # The copy from pinned memory overlaps with the previous step; later kernels wait for it.
        with torch.cuda.stream(self._stream):
            copied = batch.to(self._device)
        reader = torch.cuda.current_stream(self._device)
        reader.wait_stream(self._stream)
        for leaf in tree_leaves(copied):
            if isinstance(leaf, Tensor):
                leaf.record_stream(reader)  # its memory is not reused before the reader's last use
        return copied


RngFactory = Callable[[str], np.random.Generator]  # purpose, such as "augment" -> generator


class MapDatasetConfig(Config):
    """Loader settings of a map-style data set; base of the data of downstream and vision tasks."""

    canonical_streams: int = Field(8, ge=1, description="the number of ranks divides it")
    workers: int = Field(
        0, ge=0, description="loader processes of each rank", json_schema_extra={"resume": "free"}
    )
    max_skipped_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="more skipped samples than this share of an epoch end the run",
        json_schema_extra={"resume": "free"},
    )


def warn_of_training_data(train: str, test: str) -> None:
    """Warn of test data that are the training data, or a part of them; "" names no data."""
    folder, path = Path(os.path.realpath(train)), Path(os.path.realpath(test))
    if train and test and (path == folder or _is_part(path, folder)):
        warnings.warn(
            f"the test data {test} are training data: figures say nothing about other data",
            stacklevel=2,
        )


def _is_part(path: Path, folder: Path) -> bool:
    """Return whether `path` is a shard of a folder, or a folder in its class folders."""
    if path.suffix == ".tar" or not path.is_relative_to(folder):
        return path.suffix == ".tar" and path.parent == folder
    # Of a folder with shards nothing else is read, and of class folders no tar.
    has_shards = any(folder.glob("*.tar")) or any(path.glob("*.tar"))
    return os.path.isdir(path) and not has_shards and not is_hidden(str(path.relative_to(folder)))


class LabelledImagesConfig(MapDatasetConfig):
    """Training and test images with classes: any source of `vlp.data.labelled_images`."""

    train: str = Field(
        description="images to train on: tar file, folder of class folders, or labelled shards",
        json_schema_extra={"resume": "path"},
    )
    test: str = Field(
        description="images to evaluate on, in any of the forms of `train`",
        json_schema_extra={"resume": "tolerated"},
    )
    classes: tuple[str, ...] | None = Field(
        None, min_length=1, description="class names in order; required for shards alone"
    )
    limit: int | None = Field(None, ge=1, description="images of `train`, drawn once")

    @model_validator(mode="after")
    def _warn_of_training_data(self) -> LabelledImagesConfig:
        warn_of_training_data(self.train, self.test)
        return self


class IndexedSamples(Dataset[Any]):
    """Dataset that reads the sample of a row by `read(number, rng_for)`."""

    def __init__(self, read: Callable[[int, RngFactory], Any], seed: int) -> None:
        self._read, self._seed = read, seed

    def __getitem__(self, request: Request) -> Any:
        """Return the row's sample, a `SkippedSample` if it is bad, or None for an empty row."""
        if request.sample_index is None:
            return None
        number, source_pass = request.sample_index.position, request.sample_index.source_pass

        def rng_for(purpose: str) -> np.random.Generator:
            return make_rng(self._seed, request.epoch, f"{number}:{source_pass}", purpose)

        try:
            return self._read(number, rng_for)
        except BadSample as bad:
            return SkippedSample(bad.kind, bad.where)


Collate = Callable[[list[Any], tuple[SkippedSample, ...]], RankBatch]  # (good, bad samples)


def indexed_data(
    count: int,
    read: Callable[[int, RngFactory], Any],
    collate: Collate,
    config: MapDatasetConfig,
    batch: int,
    seed: int,
) -> OrderedData:
    """Return batches of `count` samples, each once per epoch, the same for any number of ranks.

    `collate` gets a rank's good samples (maybe an empty list) and its bad ones.
    """
    require_equal_streams(batch, config.canonical_streams, "task.data")
    sampler = TrainingSampler([Source([count])], config.canonical_streams, max(count, 1), seed)
    return OrderedData(
        sampler,
        IndexedSamples(read, seed),
        partial(_collate, collate),
        batch,
        config.workers,
        config.max_skipped_share,
    )


def _collate(collate: Collate, samples: list[Any]) -> RankBatch:
    good = [s for s in samples if s is not None and not isinstance(s, SkippedSample)]
    return collate(good, tuple(s for s in samples if isinstance(s, SkippedSample)))
