from __future__ import annotations

from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from vlp.data.stream.loader import BatchRequest, ShardAwareBatchSampler, read_at_once
from vlp.data.stream.sampler import Pool, TrainingSampler

shards = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(sum)
numbers = st.integers(1, 4)


def shards_of(asked: BatchRequest) -> set[tuple[int, int]]:
    slots = (request.element for request in asked.slots)
    return {(element.source, element.shard) for element in slots if element is not None}


@settings(deadline=None, max_examples=40)
@given(shards, st.sampled_from([0.3, 1.0]), numbers, numbers, st.integers(1, 7), st.integers(0, 5))
def test_every_shard_is_asked_for_before_it_is_read(
    sizes: list[int], weight: float, streams: int, each: int, window: int, start: int
) -> None:
    """From wherever a run starts, and over the ends of epochs, empty ones too."""
    sampler = TrainingSampler([Pool(sizes, weight), Pool([3, 1], 0.5)], streams, window, 0)
    batch = streams * each
    consumed = [0, *(step.consumed for step in islice(sampler.steps(0, batch), start))][-1]
    for rank in range(streams):
        asked: set[tuple[int, int]] = set()
        at_once = read_at_once(sampler, batch, consumed, rank, streams)
        stream = ShardAwareBatchSampler(sampler, batch, consumed, rank, streams, 12, fetchers=1)
        for number, found in enumerate(stream):
            asked.update(found.ahead)
            assert shards_of(found) <= asked
            if number == 0:
                assert asked == at_once


@settings(deadline=None, max_examples=30)
@given(shards, numbers, st.integers(1, 7), st.integers(2, 5))
def test_workers_share_what_is_to_be_fetched(
    sizes: list[int], streams: int, window: int, workers: int
) -> None:
    sampler = TrainingSampler([Pool(sizes)], streams, window, 0)
    alone = list(ShardAwareBatchSampler(sampler, streams, 0, 0, 1, 40, fetchers=1))
    shared = list(ShardAwareBatchSampler(sampler, streams, 0, 0, 1, 40, fetchers=workers))
    assert [found.slots for found in shared] == [found.slots for found in alone]
    for number in range(40 - workers):
        asked = [one for found in alone[: number + 1] for one in found.ahead]
        dealt = [one for found in shared[: number + workers] for one in found.ahead]
        assert dealt[: len(asked)] == asked
    assert len(shared[0].ahead) == -(-len(alone[0].ahead) // workers)
    assert all(
        not found.ahead
        for found in ShardAwareBatchSampler(sampler, streams, 0, 0, 1, 9, fetchers=0)
    )


def test_a_rank_asks_for_what_it_reads_alone() -> None:
    """Two windows of each of its streams, however many shards there are."""
    sampler = TrainingSampler([Pool([100] * 1000)], streams=16, window=250, seed=1)
    for rank in range(4):
        # A window of 250 lies in at most 4 shards of 100, the next one shares one with it.
        assert len(read_at_once(sampler, 64, 0, rank, 4)) <= 4 * (4 + 3)
