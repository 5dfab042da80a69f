"""Batches in the training order, read by worker processes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from itertools import islice, takewhile
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from vlp.config import ConfigError
from vlp.data.shards.bad_samples import DataError, SkippedShareWatch
from vlp.data.stream.batch import Slots
from vlp.data.stream.batch_sampler import Answers, Prefetch, ShardAwareBatchSampler
from vlp.data.stream.sampler import EndlessSampler, TrainingSampler
from vlp.data.stream.workers import running, worker_settings


class OrderedData:
    """Batches in a training order, the same for any number of ranks and workers.

    Args:
        sampler: which sample stands where.
        samples: maps a `Request` to what `collate` takes.
        collate: makes a batch (see `vlp.data.stream.batch.Slots`) of a rank's samples.
        batch: slots of a global batch (all ranks).
        workers: loader processes of each rank.
        max_skipped_share: more bad samples than this share of an epoch end the run.
        prefetch: has a shard fetched that is needed soon; None where every shard is at hand.

    `fingerprint` holds a hash of each part of the data by its name, equal for equal data wherever
    it lies; whoever knows more of the data than its samples' number puts it there.

    Raises:
        ConfigError: the batch does not fit the order.
    """

    def __init__(
        self,
        sampler: TrainingSampler | EndlessSampler,
        samples: Dataset[Any],
        collate: Callable[[list[Any]], Slots],
        batch: int,
        workers: int = 0,
        max_skipped_share: float = 0.5,
        prefetch: Prefetch | None = None,
    ) -> None:
        self.sampler, self.samples, self.collate = sampler, samples, collate
        self.prefetch = prefetch
        self.batch, self.workers, self.max_skipped_share = batch, workers, max_skipped_share
        sampler.batches_in_epoch(0, batch)  # complains now when the batch does not fit
        self.fingerprint = {"samples of an epoch": f"{sampler.samples_in_epoch(0)}"}

    def samples_in_epoch(self, epoch: int) -> int:
        """Return the number of samples of one epoch over all ranks (pairs with `captions: all`)."""
        return self.sampler.samples_in_epoch(epoch)

    def batches_in_epoch(self, epoch: int) -> int:
        """Return the number of global batches of one epoch."""
        return self.sampler.batches_in_epoch(epoch, self.batch)

    def batches_left(self, samples_consumed: int, epochs: int) -> int:
        """Return the number of global batches from so many samples to the end of epoch `epochs`.

        Raises:
            ConfigError: no batch ends at samples_consumed.
        """
        now, _ = self.sampler.locate(samples_consumed)
        if now >= epochs:
            return 0
        steps = self.sampler.steps(samples_consumed, self.batch)
        left = sum(1 for _ in takewhile(lambda step: step.epoch == now, steps))
        return left + sum(map(self.batches_in_epoch, range(now + 1, epochs)))

    def floor(self, samples_consumed: int) -> int:
        """Return the largest number of samples up to this one after which `batches` can go on."""
        while True:
            try:
                self.sampler.locate(samples_consumed)
            except ConfigError:  # less than `canonical_streams` times
                samples_consumed -= 1
            else:
                return samples_consumed

    def batches(
        self,
        samples_consumed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        stop_after: int | None = None,
    ) -> Generator[tuple[Any, int], None, None]:
        """Yield one rank's share of the global batches, epoch after epoch without end.

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
        self.sampler.locate(samples_consumed)
        self.sampler.share(0, rank, world_size)
        loader = self._loader(samples_consumed, rank, world_size, stop_after)
        return self._watched(loader, samples_consumed, rank, world_size, stop_after)

    def _loader(
        self, consumed: int, rank: int, world_size: int, stop_after: int | None
    ) -> DataLoader[Any]:
        assert isinstance(self.sampler, TrainingSampler)
        fetchers = 0 if self.prefetch is None else max(self.workers, 1)
        requests = ShardAwareBatchSampler(
            self.sampler, self.batch, consumed, rank, world_size, stop_after, fetchers
        )
        return DataLoader(
            Answers(self.samples, self.prefetch),
            batch_sampler=requests,  # type: ignore[arg-type]  # what `Answers` takes, no list
            **self._settings(),
        )

    def _settings(self) -> dict[str, Any]:
        return {
            "collate_fn": self.collate,
            "pin_memory": torch.cuda.is_available(),
            **worker_settings(self.workers, prefetch=4),
        }

    def _watched(
        self,
        loader: DataLoader[Any],
        samples_consumed: int,
        rank: int,
        world_size: int,
        stop_after: int | None,
    ) -> Generator[tuple[Any, int], None, None]:
        try:
            with running(loader) as batches:
                watch = SkippedShareWatch(self.sampler, self.max_skipped_share, rank, world_size)
                steps = islice(self.sampler.steps(samples_consumed, self.batch), stop_after)
                for step, batch in zip(steps, batches):
                    watch.see(step.epoch, batch)
                    yield batch, step.consumed
        except DataError as error:
            raise type(error)(error.told) from error
