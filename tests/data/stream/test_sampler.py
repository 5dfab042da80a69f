from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp.config import ConfigError
from vlp.data.stream.rng import make_rng
from vlp.data.stream.sampler import Element, Pool, SampleStep, TrainingSampler


def epoch_of(order: TrainingSampler, epoch: int, size: int) -> list[list[Element | None]]:
    """All global batches of one epoch."""
    batches = []
    for step in order.steps(order.samples_before(epoch), size):
        if step.epoch != epoch:
            return batches
        batches.append(order.slots(step.epoch, step.start, size))
    raise AssertionError


def elements(batches: list[list[Element | None]]) -> list[Element]:
    return [slot for batch in batches for slot in batch if slot is not None]


def slow_epoch(
    pools: list[Pool], streams: int, window: int, seed: int, epoch: int, size: int
) -> list[list[Element | None]]:
    """The definition spelled out: everything is laid out as lists of single elements."""
    chunks: list[list[Element]] = []
    for source, pool in enumerate(pools):
        total = sum(pool.sizes)
        row, chunk_ids = [], []
        for visit in range(int(pool.weight * (epoch + 1)) + 2):
            order = make_rng(seed, visit, source, "shards").permutation(len(pool.sizes))
            for shard in order:
                for position in range(pool.sizes[shard]):
                    row.append(Element(source, int(shard), position, visit))
                    chunk_ids.append((visit, shard))
        start, stop = int(epoch * pool.weight * total), int((epoch + 1) * pool.weight * total)
        by_chunk: dict[tuple[int, int], list[Element]] = {}
        for element, chunk in zip(row[start:stop], chunk_ids[start:stop]):
            by_chunk.setdefault(chunk, []).append(element)
        chunks += by_chunk.values()
    shuffled = make_rng(seed, epoch, "epoch", "chunks").permutation(len(chunks))
    row = [element for number in shuffled for element in chunks[number]]
    pieces = []
    for stream in range(streams):
        piece = row[stream * len(row) // streams : (stream + 1) * len(row) // streams]
        mixed = []
        for number, first in enumerate(range(0, len(piece), window)):
            part = piece[first : first + window]
            order = make_rng(seed, epoch, stream, f"window {number}").permutation(len(part))
            mixed += [part[place] for place in order]
        pieces.append(mixed)
    each = size // streams
    batches = []
    for start in range(0, max(map(len, pieces)), each):
        batch: list[Element | None] = []
        for piece in pieces:
            taken = piece[start : start + each]
            batch += [*taken, *[None] * (each - len(taken))]
        batches.append(batch)
    return batches


@pytest.mark.parametrize("epoch", [0, 1, 3])
def test_against_the_definition(epoch: int) -> None:
    pools = [Pool([5, 0, 7, 3], 1.0), Pool([4, 4], 2.0), Pool([9, 2], 0.5)]
    order = TrainingSampler(pools, streams=3, window=4, seed=11)
    assert epoch_of(order, epoch, 6) == slow_epoch(pools, 3, 4, 11, epoch, 6)


sizes = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(sum)
runs = st.tuples(sizes, st.integers(1, 6), st.integers(1, 5), st.integers(1, 8), st.integers(0, 5))


@settings(deadline=None)
@given(runs)
def test_each_element_once_an_epoch(run: tuple[list[int], int, int, int, int]) -> None:
    shards, streams, each, window, seed = run
    order = TrainingSampler([Pool(shards)], streams, window, seed)
    expected = {(shard, n) for shard, size in enumerate(shards) for n in range(size)}
    for epoch in range(2):
        batches = epoch_of(order, epoch, streams * each)
        seen = elements(batches)
        assert len(seen) == sum(shards) == order.samples_in_epoch(epoch)
        assert {(element.shard, element.position) for element in seen} == expected
        assert {element.visit for element in seen} == {epoch}
        assert len(batches) == order.batches_in_epoch(epoch, streams * each)
        # Only the end of an epoch may have empty slots.
        for batch in batches[:-2]:
            assert None not in batch


@settings(deadline=None)
@given(runs, st.integers(1, 6))
def test_ranks_share_every_batch(run: tuple[list[int], int, int, int, int], world: int) -> None:
    shards, streams, each, window, seed = run
    size = streams * each
    order = TrainingSampler([Pool(shards)], streams, window, seed)
    if streams % world:
        with pytest.raises(ConfigError, match=f"{world} ranks cannot share"):
            order.slots(0, 0, size, 0, world)
        return
    for step in islice(order.steps(0, size), 5):
        apart = [order.slots(step.epoch, step.start, size, r, world) for r in range(world)]
        assert {len(slots) for slots in apart} == {size // world}
        whole = order.slots(step.epoch, step.start, size)
        assert [slot for slots in apart for slot in slots] == whole
    assert sum(order.share(0, r, world) for r in range(world)) == order.samples_in_epoch(0)


@settings(deadline=None)
@given(runs, st.integers(0, 12), st.integers(1, 4))
def test_resuming_with_another_batch_loses_and_repeats_nothing(
    run: tuple[list[int], int, int, int, int], stop: int, other: int
) -> None:
    shards, streams, each, window, seed = run
    pools = [Pool(shards), Pool([3, 2], 0.5)]
    order = TrainingSampler(pools, streams, window, seed)
    consumed = 0
    seen: list[tuple[int, Element]] = []

    def take(steps: list[SampleStep], size: int) -> int:
        for step in steps:
            seen.extend(
                (step.epoch, slot) for slot in order.slots(step.epoch, step.start, size) if slot
            )
            assert len(seen) == step.consumed
        return steps[-1].consumed if steps else consumed

    consumed = take(list(islice(order.steps(0, streams * each), stop)), streams * each)
    # A fresh process knows the number alone.
    order = TrainingSampler(pools, streams, window, seed)
    rest = []
    end = order.locate(consumed)[0] + 2
    for step in order.steps(consumed, streams * other):
        if step.epoch >= end:
            break
        rest.append(step)
    take(rest, streams * other)
    last = max(epoch for epoch, _ in seen)
    for epoch in range(last + 1):
        found = [element for number, element in seen if number == epoch]
        assert len(found) == len(set(found)) == order.samples_in_epoch(epoch)


def test_resuming_gives_the_same_batches() -> None:
    order = TrainingSampler([Pool([10, 13, 9])], streams=4, window=5, seed=3)
    whole = list(islice(order.steps(0, 8), 20))
    for number, step in enumerate(whole[:-1]):
        assert list(islice(order.steps(step.consumed, 8), 19 - number)) == whole[number + 1 :]


def test_weights() -> None:
    pools = [Pool([5, 5], 1), Pool([4, 3], 2), Pool([6, 4], 0.5), Pool([10], 0.1), Pool([3], 0.1)]
    order = TrainingSampler(pools, streams=2, window=8, seed=0)
    epochs = [elements(epoch_of(order, epoch, 4)) for epoch in range(10)]
    for seen in epochs:
        counts = Counter(element.source for element in seen)
        assert [counts[source] for source in range(4)] == [10, 14, 5, 1]
        twice = Counter((e.shard, e.position) for e in seen if e.source == 1)
        assert set(twice.values()) == {2}
        assert len(twice) == 7
        assert len(set(seen)) == len(seen)  # the two visits are told apart
    for first, second in zip(epochs[::2], epochs[1::2]):
        halves = [(e.shard, e.position) for e in first + second if e.source == 2]
        assert len(set(halves)) == len(halves) == 10
    tenths = [(e.shard, e.position) for seen in epochs for e in seen if e.source == 3]
    assert len(set(tenths)) == 10
    # 0.1 of three samples: one in the 4th, 7th and 10th epoch.
    assert [sum(e.source == 4 for e in seen) for seen in epochs] == [0, 0, 0, 1, 0, 0, 1, 0, 0, 1]


def test_epochs_without_samples_are_passed_over() -> None:
    order = TrainingSampler([Pool([2], 0.25)], streams=1, window=4, seed=0)
    assert [step.epoch for step in islice(order.steps(0, 1), 3)] == [1, 3, 5]
    assert order.locate(1) == (3, 0)


def test_order_depends_on_seed_and_epoch_and_is_shuffled() -> None:
    shards = [Pool([50] * 20)]
    first = elements(epoch_of(TrainingSampler(shards, 4, 100, 0), 0, 8))
    assert first != elements(epoch_of(TrainingSampler(shards, 4, 100, 1), 0, 8))
    places = [(e.shard, e.position) for e in first]
    second = elements(epoch_of(TrainingSampler(shards, 4, 100, 0), 1, 8))
    assert places != [(e.shard, e.position) for e in second]
    # Neighbours in a shard do not stay neighbours in the order.
    near = sum(a[0] == b[0] and abs(a[1] - b[1]) == 1 for a, b in pairwise(places))
    assert near < 0.1 * len(places)


def test_a_stream_reads_few_shards_at_a_time() -> None:
    order = TrainingSampler([Pool([100] * 40)], streams=4, window=100, seed=0)
    opened = {e.shard for e in elements([order.slots(0, 0, 400, rank=0, world_size=4)])}
    assert len(opened) <= 2


def test_numbers_that_fit_no_run() -> None:
    order = TrainingSampler([Pool([10])], streams=4, window=4, seed=0)
    assert order.locate(8) == (0, 2)
    assert order.locate(10) == (1, 0)
    for wrong in (9, 11, -4):
        with pytest.raises(ConfigError, match="no batch ends there"):
            order.locate(wrong)
    with pytest.raises(ConfigError, match="not a multiple of"):
        order.slots(0, 0, 6)


@pytest.mark.parametrize("pools", [[], [Pool([])], [Pool([0, 0]), Pool([0])]])
def test_no_samples_is_an_error_not_a_hang(pools: list[Pool]) -> None:
    with pytest.raises(ConfigError, match="hold no samples"):
        TrainingSampler(pools, 2, 4, 0)


def test_large_corpora_are_not_laid_out() -> None:
    order = TrainingSampler([Pool(np.full(5000, 1000))], streams=64, window=4096, seed=0)  # type: ignore[arg-type]
    slots = order.slots(0, 70_000, 512, rank=3, world_size=8)
    assert len(set(slots)) == 64
    assert order.samples_in_epoch(3) == 5_000_000


@pytest.mark.parametrize(
    ("world", "can"), [(3, "2 or 4 can"), (7, "4 or 8 can"), (65, "64 can"), (1000, "64 can")]
)
def test_numbers_of_ranks_that_can_share_are_named(world: int, can: str) -> None:
    order = TrainingSampler([Pool([200])], 64, 10, 0)
    with pytest.raises(ConfigError, match=rf"canonical_streams 64 evenly; {can}$"):
        order.slots(0, 0, 64, 0, world)
