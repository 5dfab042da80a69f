"""Requests to loader workers, batch by batch, and the shards to fetch meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from vlp.data.stream.sampler import Request, SampleStep, TrainingSampler

Prefetch = Callable[[int, int], object]
"""Is told (source, shard) in a worker, about a window before the shard is needed."""


class BatchRequest(NamedTuple):
    """The slots of one rank's share of a batch, and shards that are needed soon."""

    slots: list[Request]
    ahead: list[tuple[int, int]]


class ShardAwareBatchSampler:
    """Yield one `BatchRequest` for each global batch: the batch sampler of a torch `DataLoader`.

    Args:
        sampler: which sample stands where.
        batch: slots of a global batch.
        consumed: samples that are gone.
        rank: whose slots.
        world_size: number of ranks.
        stop_after: number of batches; None is no end.
        fetchers: workers among which shards to fetch are dealt out; 0 asks for none.
    """

    def __init__(
        self,
        sampler: TrainingSampler,
        batch: int,
        consumed: int,
        rank: int,
        world_size: int,
        stop_after: int | None,
        fetchers: int,
    ) -> None:
        self._sampler, self._batch, self._consumed = sampler, batch, consumed
        self._share = rank, world_size
        self._stop_after, self._fetchers = stop_after, fetchers

    def __iter__(self) -> Iterator[BatchRequest]:
        ahead = self._ahead() if self._fetchers else None
        for step in islice(self._sampler.steps(self._consumed, self._batch), self._stop_after):
            slots = self._sampler.slots(step.epoch, step.start, self._batch, *self._share)
            requests = [Request(step.epoch, element) for element in slots]
            yield BatchRequest(requests, [] if ahead is None else next(ahead))

    def _ahead(self) -> Iterator[list[tuple[int, int]]]:
        """Yield each batch's part of the shards of the window after the one it stands in."""
        waiting: deque[tuple[int, int]] = deque()
        last, at_once = (-1, 0), 0
        for step in self._sampler.steps(self._consumed, self._batch):
            new = [window for window in self._windows(step) if window > last]
            at_once = at_once if waiting else 0
            for window in new:
                waiting.extend(self._sampler.shards_of_window(*window, *self._share))
                last = window
            at_once = max(at_once, -(-len(waiting) // self._fetchers))
            yield [waiting.popleft() for _ in range(min(at_once, len(waiting)))]

    def _windows(self, step: SampleStep) -> list[tuple[int, int]]:
        """Return (epoch, number) of the windows a batch takes from, and of the one after."""
        behind = step.start + self._batch // self._sampler.streams
        end = min(
            -(-behind // self._sampler.prefetch_window), self._sampler.windows_in_epoch(step.epoch)
        )
        touched = [
            (step.epoch, number)
            for number in range(step.start // self._sampler.prefetch_window, end)
        ]
        return [*touched, self._after(*touched[-1])]

    def _after(self, epoch: int, window: int) -> tuple[int, int]:
        if window + 1 < self._sampler.windows_in_epoch(epoch):
            return epoch, window + 1
        epoch += 1
        while not self._sampler.samples_in_epoch(epoch):
            epoch += 1
        return epoch, 0


def read_at_once(
    sampler: TrainingSampler, batch: int, consumed: int, rank: int, world_size: int
) -> set[tuple[int, int]]:
    """Return (source, shard) that a rank needs at a time: its streams' windows and the next."""
    return set(
        next(ShardAwareBatchSampler(sampler, batch, consumed, rank, world_size, None, 1)._ahead())
    )


class Answers(Dataset[Any]):
    """Gives the slots that are asked for, and passes on which shards to fetch.

    Args:
        samples: maps a `Request` to a slot.
        prefetch: is told which shards are needed soon; None where nothing has to be fetched.
    """

    def __init__(self, samples: Dataset[Any], prefetch: Prefetch | None) -> None:
        self.samples, self.prefetch = samples, prefetch

    def __getitems__(self, asked: BatchRequest) -> list[Any]:
        """Return all slots of a batch; `DataLoader` calls this with what its batch sampler gave."""
        if self.prefetch is not None:
            for source, shard in asked.ahead:
                self.prefetch(source, shard)
        several = getattr(self.samples, "__getitems__", None)
        if several is not None:
            return several(asked.slots)
        return [self.samples[request] for request in asked.slots]

    def __getitem__(self, request: Request) -> Any:
        """Return the slot of a single request."""
        return self.samples[request]
