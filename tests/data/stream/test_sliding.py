"""The sliding order: every element once, shards that stay with their streams, and good mixing."""

from __future__ import annotations

from collections import Counter
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp.data.stream.loader import read_at_once
from vlp.data.stream.rng import make_rng
from vlp.data.stream.sampler import Element, Pool, SlidingSampler, TrainingSampler


def epoch_of(order: TrainingSampler, epoch: int, size: int) -> list[list[Element | None]]:
    batches = []
    for step in order.steps(order.samples_before(epoch), size):
        if step.epoch != epoch:
            return batches
        batches.append(order.slots(step.epoch, step.start, size))
    raise AssertionError


def slow_streams(
    sizes: list[int], streams: int, window: int, seed: int, epoch: int
) -> list[list[tuple[int, int]]]:
    """The definition spelled out for one source of weight 1: (shard, position) of each stream."""
    keys = make_rng(seed, 0, 0, "deal").random(len(sizes))
    shards = sorted((shard for shard in range(len(sizes)) if sizes[shard]), key=keys.__getitem__)
    row = [(shard, position) for shard in shards for position in range(sizes[shard])]
    pieces: list[tuple[int, list[tuple[int, int]]]] = []
    for stream in range(streams):
        part = row[stream * len(row) // streams : (stream + 1) * len(row) // streams]
        for shard in dict.fromkeys(shard for shard, _ in part):
            pieces.append((stream, [place for place in part if place[0] == shard]))
    mixed = make_rng(seed, epoch, "epoch", "chunks").random(len(pieces))
    ordered = [
        pieces[n] for n in sorted(range(len(pieces)), key=lambda n: (pieces[n][0], mixed[n]))
    ]
    return [
        slow_stream(
            [piece for owner, piece in ordered if owner == stream], window, seed, epoch, stream
        )
        for stream in range(streams)
    ]


def slow_stream(
    chunks: list[list[tuple[int, int]]], window: int, seed: int, epoch: int, stream: int
) -> list[tuple[int, int]]:
    length, block = sum(map(len, chunks)), max(1, window // 8)
    shifts = make_rng(seed, epoch, stream, "shifts").random(len(chunks))
    blocks: list[list[tuple[float, int, tuple[int, int]]]] = [
        [] for _ in range(ceil(length / block))
    ]
    first = 0
    for number, chunk in enumerate(chunks):
        size = len(chunk)
        begin, end = max(first + (size - window) / 2, 0), min(first + (size + window) / 2, length)
        rng = make_rng(seed, epoch, stream, f"chunk {number}")
        order, within = rng.permutation(size), rng.random(size)
        before = 0
        for at in range(int(begin // block), ceil(end / block)):
            came = ceil(((at + 1) * block - begin) * size / (end - begin) - shifts[number])
            came = size if (at + 1) * block >= end else min(max(came, 0), size)
            for place in range(before, came):
                time = (place - before + within[place]) / (came - before)
                blocks[at].append((time, -number, chunk[order[place]]))
            before = came
        first += size
    return [place for mixed in blocks for _, _, place in sorted(mixed)]


runs = st.tuples(
    st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(sum),
    st.integers(1, 5), st.integers(1, 40), st.integers(0, 5), st.integers(0, 3),
)  # fmt: skip


@given(runs)
@settings(max_examples=150, deadline=None)
def test_against_the_definition(
    run: tuple[list[int], int, int, int, int],
) -> None:
    sizes, streams, window, seed, epoch = run
    order = SlidingSampler([Pool(sizes)], streams, window, seed)
    found: list[list[tuple[int, int]]] = [[] for _ in range(streams)]
    for batch in epoch_of(order, epoch, streams):
        for stream, element in enumerate(batch):
            if element is not None:
                found[stream].append((element.shard, element.position))
    assert found == slow_streams(sizes, streams, window, seed, epoch)


@given(runs, st.sampled_from([0.5, 1.0, 1.5, 2.0]))
@settings(max_examples=100, deadline=None)
def test_every_element_once_for_any_number_of_ranks(
    run: tuple[list[int], int, int, int, int], weight: float
) -> None:
    sizes, streams, window, seed, epoch = run
    pools = [Pool(sizes, weight), Pool([3, 1])]
    order = SlidingSampler(pools, streams, window, seed)
    batches = epoch_of(order, epoch, 2 * streams)
    found = Counter(slot for batch in batches for slot in batch if slot is not None)
    assert set(found.values()) == {1}
    assert found.total() == order.samples_in_epoch(epoch)
    fresh = SlidingSampler(pools, streams, window, seed)
    start = len(batches) // 2
    parts = [fresh.slots(epoch, 2 * start, 2 * streams, rank, streams) for rank in range(streams)]
    assert [slot for part in parts for slot in part] == (batches[start] if batches else [])


def test_shards_are_fetched_before_they_are_read() -> None:
    order = SlidingSampler([Pool([10, 13, 9, 20, 7] * 5)], 4, 48, 0)
    for rank in range(2):
        consumed = 0
        for step in order.steps(0, 8):
            if step.epoch == 2:
                break
            slots = order.slots(step.epoch, step.start, 8, rank, 2)
            read = {(slot.source, slot.shard) for slot in slots if slot is not None}
            assert read <= read_at_once(order, 8, consumed, rank, 2)
            consumed = step.consumed


def test_a_stream_has_the_same_shards_in_every_epoch() -> None:
    order = SlidingSampler([Pool([100] * 40), Pool([50] * 20, 2.0)], 8, 300, 5)
    ranks = [
        [
            {
                (slot.source, slot.shard)
                for start in range(0, order.samples_in_epoch(epoch) // 8, 2)
                for slot in order.slots(epoch, start, 16, rank, 4)
                if slot is not None
            }
            for epoch in range(3)
        ]
        for rank in range(4)
    ]
    for epochs in ranks:
        assert epochs[0] == epochs[1] == epochs[2]
    firsts = [order.slots(epoch, 0, 16) for epoch in range(3)]
    assert firsts[0] != firsts[1] != firsts[2]


@pytest.mark.parametrize("epoch", [0, 1])
def test_it_mixes_as_well_as_a_uniform_shuffle(epoch: int) -> None:
    """Four million samples in shards of 1,000, batches of 512, at most 64 shards held by a rank."""
    shards, streams, batch = 4000, 64, 512
    order = SlidingSampler([Pool(np.full(shards, 1000))], streams, 11_000, 0)  # type: ignore[arg-type]
    pairs, batches = 0, 60
    for number in range(batches):
        found = Counter(
            slot.shard for slot in order.slots(epoch, number * 1000, batch) if slot is not None
        )
        pairs += sum(count * (count - 1) // 2 for count in found.values())
    uniform = batch * (batch - 1) / 2 / shards
    assert pairs / batches < 2 * uniform
    assert max(len(read_at_once(order, batch, n * 512_000, 3, 16)) for n in range(7)) <= 64
