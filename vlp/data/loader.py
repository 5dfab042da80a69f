"""Batches in the training order, read by worker processes; pretraining's among them."""

from __future__ import annotations

import atexit
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from vlp.config import ConfigError
from vlp.data.batch import Skip, Slots
from vlp.data.config import DataConfig
from vlp.data.inputs import Inputs
from vlp.data.order import Pool, TrainingOrder
from vlp.data.samples import CaptionedSamples, Request, collate
from vlp.data.shards import ShardIndex
from vlp.data.text import TextProcessor
from vlp.data.transforms import Preprocessing, TrainTransform


class DataError(RuntimeError):
    """The data cannot carry the run any further; the message is meant for the person."""


class OrderedData:
    """Batches in a training order, the same for any number of ranks and workers.

    Args:
        order: which sample stands where.
        samples: maps a `Request` to what `collate` takes.
        collate: makes a batch (see `vlp.data.batch.Slots`) of a rank's samples.
        batch: slots of a global batch (all ranks).
        workers: loader processes of each rank.
        max_skipped_share: more bad samples than this share of an epoch end the run.

    Raises:
        ConfigError: the batch does not fit the order.
    """

    def __init__(
        self,
        order: TrainingOrder,
        samples: Dataset[Any],
        collate: Callable[[list[Any]], Slots],
        batch: int,
        workers: int = 0,
        max_skipped_share: float = 0.5,
    ) -> None:
        self.order, self.samples, self.collate = order, samples, collate
        self.batch, self.workers, self.max_skipped_share = batch, workers, max_skipped_share
        order.batches_in_epoch(0, batch)  # complains now when the batch does not fit

    def samples_in_epoch(self, epoch: int) -> int:
        """Samples of one epoch over all ranks (pairs with `captions: all`)."""
        return self.order.samples_in_epoch(epoch)

    def batches_in_epoch(self, epoch: int) -> int:
        """Global batches of one epoch."""
        return self.order.batches_in_epoch(epoch, self.batch)

    def batches(
        self,
        samples_consumed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        stop_after: int | None = None,
    ) -> Iterator[tuple[Any, int]]:
        """One rank's share of the global batches, epoch after epoch without end.

        Args:
            samples_consumed: where to go on; the number that came with the last batch used, by any
                number of ranks.
            rank: whose share.
            world_size: number of ranks; it divides `canonical_streams`.
            stop_after: number of batches after which to end; None is never.

        Yields:
            The batch, and the samples consumed by all ranks after it.

        Raises:
            ConfigError: the ranks cannot share the streams, or no batch ends at samples_consumed.
            DataError: more than `max_skipped_share` of this rank's epoch, or all of it, is bad.
        """
        self.order.locate(samples_consumed)
        self.order.share(0, rank, world_size)
        requests = _Requests(self.order, self.batch, samples_consumed, rank, world_size, stop_after)
        workers = self.workers
        loader = DataLoader(
            self.samples,
            batch_sampler=requests,
            collate_fn=self.collate,
            num_workers=workers,
            prefetch_factor=4 if workers else None,
            worker_init_fn=_prepare_worker if workers else None,
            pin_memory=torch.cuda.is_available(),
        )
        return self._watched(loader, samples_consumed, rank, world_size)

    def _watched(
        self, loader: DataLoader[Any], samples_consumed: int, rank: int, world_size: int
    ) -> Iterator[tuple[Any, int]]:
        batches = iter(loader)
        # A generator that is never closed, as after an exception, must not leave workers behind.
        stop = getattr(batches, "_shutdown_workers", None)
        if stop is not None:
            atexit.register(stop)
        try:
            watch = _SkipWatch(self.order, self.max_skipped_share, rank, world_size)
            for step, batch in zip(self.order.steps(samples_consumed, self.batch), batches):
                watch.see(step.epoch, batch)
                yield batch, step.consumed
        finally:
            if stop is not None:
                atexit.unregister(stop)
                stop()


class PretrainData(OrderedData):
    """The batches of one pretraining run, the same for any number of ranks and workers.

    Args:
        config: sources, order and preparation.
        inputs: sizes of text and picture, and which masks are drawn.
        batch: slots of a global batch (all ranks).
        seed: of the run.

    Raises:
        ConfigError: a folder, its index or the vocabulary is missing or does not fit.
    """

    def __init__(
        self,
        config: DataConfig,
        inputs: Inputs,
        batch: int,
        seed: int,
    ) -> None:
        self.config = config
        self.text = TextProcessor.load(config.vocabulary, inputs.max_tokens)
        _require_fit(config, inputs, self.text)
        self.preprocessing = Preprocessing(inputs.image_size)
        self.sources = [ShardIndex.open(source.path) for source in config.sources]
        counts = _elements(self.sources) if config.captions == "all" else None
        pools = []
        for number, (source, index) in enumerate(zip(config.sources, self.sources)):
            if not len(index):
                raise ConfigError(f"{source.path}: its shards hold no samples")
            sizes = (
                [entry.samples for entry in index.shards]
                if counts is None
                else [int(shard.sum()) for shard in counts[number]]
            )
            pools.append(Pool(sizes, source.weight))
        super().__init__(
            TrainingOrder(pools, config.canonical_streams, config.shuffle_window, seed),
            CaptionedSamples(
                self.sources,
                counts,
                self.text,
                TrainTransform(config.augment, self.preprocessing),
                inputs,
                seed,
            ),
            collate,
            batch,
            config.workers,
            config.max_skipped_share,
        )


class _Requests:
    """What the workers are asked for: one list of requests per batch."""

    def __init__(
        self,
        order: TrainingOrder,
        batch: int,
        consumed: int,
        rank: int,
        world_size: int,
        stop_after: int | None,
    ) -> None:
        self._order = order
        self._batch = batch
        self._consumed = consumed
        self._share = rank, world_size
        self._stop_after = stop_after

    def __iter__(self) -> Iterator[list[Request]]:
        for number, step in enumerate(self._order.steps(self._consumed, self._batch)):
            if number == self._stop_after:
                return
            slots = self._order.slots(step.epoch, step.start, self._batch, *self._share)
            yield [Request(step.epoch, element) for element in slots]


class _SkipWatch:
    """Ends a run whose data is mostly bad, epoch by epoch.

    It sees one rank's samples, from where the run started or resumed.
    """

    def __init__(self, order: TrainingOrder, max_share: float, rank: int, world_size: int) -> None:
        self._order = order
        self._max_share = max_share
        self._ranks = rank, world_size
        self._epoch = -1
        self._expected = 0
        self._good = 0
        self._skipped: list[Skip] = []

    def see(self, epoch: int, batch: Slots) -> None:
        if epoch != self._epoch:
            self._end_epoch()
            self._epoch = epoch
            self._expected = self._order.share(epoch, *self._ranks)
            self._good, self._skipped = 0, []
        self._good += int(batch.valid.sum())
        self._skipped.extend(batch.skipped)
        if len(self._skipped) > self._max_share * self._expected:
            raise DataError(
                f"{len(self._skipped)} of {self._expected} samples of epoch {epoch} are bad, more "
                f"than data.max_skipped_share {self._max_share}; {self._last()}"
            )

    def _end_epoch(self) -> None:
        if self._skipped and not self._good:
            raise DataError(
                f"nothing is left of epoch {self._epoch}: all of its {len(self._skipped)} samples "
                f"are bad; {self._last()}"
            )

    def _last(self) -> str:
        last = self._skipped[-1]
        return f"the last one: {last.kind}, {last.where}"


def _elements(sources: list[ShardIndex]) -> list[list[np.ndarray]]:
    """Elements of each sample when every caption is one; a sample without text is one bad one."""
    return [
        [np.maximum(np.asarray(entry.captions, dtype=np.int64), 1) for entry in index.shards]
        for index in sources
    ]


def _require_fit(config: DataConfig, inputs: Inputs, text: TextProcessor) -> None:
    if text.vocab_size > inputs.vocab_size:
        raise ConfigError(
            f"the vocabulary {config.vocabulary} has {text.vocab_size} tokens, but "
            f"model.text.vocab_size is {inputs.vocab_size}"
        )


def _prepare_worker(number: int) -> None:
    # Ctrl-C and a scheduler's SIGTERM reach every process of the job. The main process answers them
    # (it writes a checkpoint); workers end when it stops or closes them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
