import hashlib
from collections import Counter, defaultdict
from itertools import islice
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp.config import ConfigError
from vlp.data.stream import sampler as module
from vlp.data.stream.loader import BatchDataset, ShardAwareBatchSampler, concurrent_shards
from vlp.data.stream.rng import make_rng, stable_hash
from vlp.data.stream.sampler import SampleIndex, SlidingSampler, Source, TrainingSampler


def epoch_of(order, epoch, size):
    batches = []
    for step in order.global_batches(order.samples_before(epoch), size):
        if step.epoch != epoch:
            return batches
        batches.append(order.rows(step.epoch, step.start, size))
    raise AssertionError


def slow_epoch(pools, streams, window, seed, epoch, size):
    """The definition spelled out: everything is laid out as lists of single samples."""
    chunks = []
    for source, pool in enumerate(pools):
        total = sum(pool.sizes)
        row, chunk_ids = [], []
        for visit in range(int(pool.weight * (epoch + 1)) + 2):
            order = make_rng(seed, visit, source, "shards").permutation(len(pool.sizes))
            for shard in order:
                for position in range(pool.sizes[shard]):
                    row.append(SampleIndex(source, int(shard), position, visit))
                    chunk_ids.append((visit, shard))
        start, stop = int(epoch * pool.weight * total), int((epoch + 1) * pool.weight * total)
        by_chunk = {}
        for sample, chunk in zip(row[start:stop], chunk_ids[start:stop]):
            by_chunk.setdefault(chunk, []).append(sample)
        chunks += by_chunk.values()
    shuffled = make_rng(seed, epoch, "epoch", "chunks").permutation(len(chunks))
    row = [sample for number in shuffled for sample in chunks[number]]
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
        batch = []
        for piece in pieces:
            taken = piece[start : start + each]
            batch += [*taken, *[None] * (each - len(taken))]
        batches.append(batch)
    return batches


sizes = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(sum)
weights = st.sampled_from([0.1, 0.5, 1.0, 2.0])


@settings(deadline=None)
@given(st.lists(st.tuples(sizes, weights), min_size=1, max_size=3), st.integers(1, 4),
       st.integers(1, 5), st.integers(0, 5), st.integers(0, 3))  # fmt: skip
def test_windows_against_their_definition(sources, streams, window, seed, epoch):
    pools = [Source(*source) for source in sources] + [Source([3, 2])]
    order = TrainingSampler(pools, streams, window, seed)
    for each in (2, window):
        expected = slow_epoch(pools, streams, window, seed, epoch, each * streams)
        assert epoch_of(order, epoch, each * streams) == expected
    for number, batch in enumerate(expected):
        shards = {(sample.source, sample.shard) for sample in batch if sample is not None}
        assert set(order.shards_of_unit(epoch, number)) == shards


runs = st.tuples(sizes, st.integers(1, 6), st.integers(1, 5), st.integers(1, 8), st.integers(0, 5))


@settings(deadline=None)
@given(runs, st.integers(1, 6))
def test_ranks_share_every_batch(run, world):
    shards, streams, each, window, seed = run
    size = streams * each
    order = TrainingSampler([Source(shards)], streams, window, seed)
    if streams % world:
        with pytest.raises(ConfigError, match=f"{world} ranks cannot share"):
            order.rows(0, 0, size, 0, world)
        return
    for step in islice(order.global_batches(0, size), 5):
        apart = [order.rows(step.epoch, step.start, size, r, world) for r in range(world)]
        assert {len(slots) for slots in apart} == {size // world}
        whole = order.rows(step.epoch, step.start, size)
        assert [slot for slots in apart for slot in slots] == whole
    shares = [order.samples_of_rank(0, rank, world) for rank in range(world)]
    assert sum(shares) == order.samples_in_epoch(0)


@settings(deadline=None)
@given(runs, st.integers(0, 12), st.integers(1, 4))
def test_resuming_with_another_batch_loses_and_repeats_nothing(run, stop, other):
    shards, streams, each, window, seed = run
    pools = [Source(shards), Source([3, 2], 0.5)]
    order = TrainingSampler(pools, streams, window, seed)
    consumed = 0
    seen = []

    def take(steps, size):
        for step in steps:
            slots = order.rows(step.epoch, step.start, size)
            seen.extend((step.epoch, slot) for slot in slots if slot)
            assert len(seen) == step.consumed
        return steps[-1].consumed if steps else consumed

    consumed = take(list(islice(order.global_batches(0, streams * each), stop)), streams * each)
    # A fresh process knows the number alone.
    order = TrainingSampler(pools, streams, window, seed)
    rest = []
    end = order.locate(consumed)[0] + 2
    for step in order.global_batches(consumed, streams * other):
        if step.epoch >= end:
            break
        rest.append(step)
    take(rest, streams * other)
    last = max(epoch for epoch, _ in seen)
    for epoch in range(last + 1):
        found = [sample for number, sample in seen if number == epoch]
        assert len(found) == len(set(found)) == order.samples_in_epoch(epoch)


def test_numbers_that_fit_no_run():
    order = TrainingSampler([Source([10])], streams=4, window=4, seed=0)
    assert order.locate(8) == (0, 2)
    assert order.locate(10) == (1, 0)
    for wrong in (9, 11, -4):
        with pytest.raises(ConfigError, match="no batch ends there"):
            order.locate(wrong)
    with pytest.raises(ConfigError, match="not a multiple of"):
        order.rows(0, 0, 6)


@pytest.mark.parametrize("pools", [[], [Source([0, 0]), Source([0])], [Source([5], 1e-9)]])
def test_no_samples_is_an_error_not_a_hang(pools):
    with pytest.raises(ConfigError, match="hold no samples"):
        TrainingSampler(pools, 2, 4, 0)


def slow_streams(sizes, streams, window, seed, epoch):
    """The definition spelled out for one source of weight 1: (shard, position) of each stream."""
    keys = make_rng(seed, 0, 0, "deal").random(len(sizes))
    shards = sorted((shard for shard in range(len(sizes)) if sizes[shard]), key=keys.__getitem__)
    row = [(shard, position) for shard in shards for position in range(sizes[shard])]
    pieces = []
    for stream in range(streams):
        part = row[stream * len(row) // streams : (stream + 1) * len(row) // streams]
        for shard in dict.fromkeys(shard for shard, _ in part):
            pieces.append((stream, [place for place in part if place[0] == shard]))
    mixed = make_rng(seed, epoch, "epoch", "chunks").random(len(pieces))
    numbers = sorted(range(len(pieces)), key=lambda n: (pieces[n][0], mixed[n]))
    ordered = [pieces[n] for n in numbers]
    chunks = [[piece for owner, piece in ordered if owner == stream] for stream in range(streams)]
    return [slow_stream(each, window, seed, epoch, stream) for stream, each in enumerate(chunks)]


def slow_stream(chunks, window, seed, epoch, stream):
    length, block = sum(map(len, chunks)), max(1, window // 8)
    shifts = make_rng(seed, epoch, stream, "shifts").random(len(chunks))
    blocks = [[] for _ in range(ceil(length / block))]
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


sliding_runs = st.tuples(
    st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(sum),
    st.integers(1, 5), st.integers(1, 40), st.integers(0, 5), st.integers(0, 3),
)  # fmt: skip


@given(sliding_runs)
@settings(max_examples=150, deadline=None)
def test_the_sliding_order_against_its_definition(run):
    sizes, streams, window, seed, epoch = run
    order = SlidingSampler([Source(sizes)], streams, window, seed)
    found = [[] for _ in range(streams)]
    for batch in epoch_of(order, epoch, streams):
        for stream, sample in enumerate(batch):
            if sample is not None:
                found[stream].append((sample.shard, sample.position))
    assert found == slow_streams(sizes, streams, window, seed, epoch)


@given(sliding_runs, st.sampled_from([0.5, 1.0, 1.5, 2.0]))
@settings(max_examples=100, deadline=None)
def test_every_element_once_for_any_number_of_ranks(run, weight):
    sizes, streams, window, seed, epoch = run
    pools = [Source(sizes, weight), Source([3, 1])]
    order = SlidingSampler(pools, streams, window, seed)
    batches = epoch_of(order, epoch, 2 * streams)
    found = Counter(slot for batch in batches for slot in batch if slot is not None)
    assert set(found.values()) == {1}
    assert found.total() == order.samples_in_epoch(epoch)
    fresh = SlidingSampler(pools, streams, window, seed)
    start = len(batches) // 2
    parts = [fresh.rows(epoch, 2 * start, 2 * streams, rank, streams) for rank in range(streams)]
    assert [slot for part in parts for slot in part] == (batches[start] if batches else [])


def test_it_mixes_as_well_as_a_uniform_shuffle():
    """Four million samples in shards of 1,000, batches of 512, at most 64 shards held by a rank."""
    shards, streams, batch = 4000, 64, 512
    order = SlidingSampler([Source(np.full(shards, 1000))], streams, 11_000, 0)
    pairs, batches = 0, 60
    for number in range(batches):
        found = Counter(
            slot.shard for slot in order.rows(1, number * 1000, batch) if slot is not None
        )
        pairs += sum(count * (count - 1) // 2 for count in found.values())
    uniform = batch * (batch - 1) / 2 / shards
    assert pairs / batches < 2 * uniform
    assert max(len(concurrent_shards(order, batch, n * 512_000, 3, 16)) for n in range(7)) <= 64


@pytest.mark.parametrize("kind", [TrainingSampler, SlidingSampler])
def test_orders_are_drawn_once_while_batches_read_on(kind, monkeypatch):
    drawn = Counter()
    monkeypatch.setattr(module, "make_rng", lambda *key: drawn.update([key]) or make_rng(*key))
    order = kind([Source([50, 50])], 2, 20, 0)
    for start in range(50):
        order.rows(0, start, 2)
    assert {count for key, count in drawn.items() if "chunk " not in key[-1]} == {1}


shards = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(sum)
numbers = st.integers(1, 4)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([TrainingSampler, SlidingSampler]), shards, st.sampled_from([0.3, 1.0]),
       numbers, numbers, st.integers(1, 7), st.integers(0, 5))  # fmt: skip
def test_every_shard_is_asked_for_before_it_is_read(
    kind, sizes, weight, streams, each, window, start
):  # fmt: skip
    sampler = kind([Source(sizes, weight), Source([3, 1], 0.5)], streams, window, 0)
    batch = streams * each
    consumed = [0, *(step.consumed for step in islice(sampler.global_batches(0, batch), start))][-1]
    for rank in range(streams):
        asked = set()
        at_once = concurrent_shards(sampler, batch, consumed, rank, streams)
        stream = ShardAwareBatchSampler(sampler, batch, consumed, rank, streams, 12, fetchers=1)
        for number, found in enumerate(stream):
            asked.update(found.prefetch)
            samples = [request.sample_index for request in found.rows if request.sample_index]
            assert {(sample.source, sample.shard) for sample in samples} <= asked
            if number == 0:
                assert asked == at_once


@settings(deadline=None, max_examples=30)
@given(shards, numbers, st.integers(1, 7), st.integers(2, 5))
def test_workers_share_what_is_to_be_fetched(sizes, streams, window, workers):
    sampler = TrainingSampler([Source(sizes)], streams, window, 0)
    alone = list(ShardAwareBatchSampler(sampler, streams, 0, 0, 1, 40, fetchers=1))
    shared = list(ShardAwareBatchSampler(sampler, streams, 0, 0, 1, 40, fetchers=workers))
    assert [found.rows for found in shared] == [found.rows for found in alone]
    for number in range(40 - workers):
        asked = [one for found in alone[: number + 1] for one in found.prefetch]
        dealt = [one for found in shared[: number + workers] for one in found.prefetch]
        assert dealt[: len(asked)] == asked
    assert len(shared[0].prefetch) == -(-len(alone[0].prefetch) // workers)
    fetched = []
    BatchDataset(defaultdict(int), lambda *shard: fetched.append(shard)).__getitems__(alone[0])
    assert fetched == alone[0].prefetch
    without = ShardAwareBatchSampler(sampler, streams, 0, 0, 1, 9, fetchers=0)
    assert not any(found.prefetch for found in without)


def test_a_rank_asks_for_what_it_reads_alone():
    sampler = TrainingSampler([Source([100] * 1000)], streams=16, window=250, seed=1)
    for rank in range(4):
        # A window of 250 lies in at most 4 shards of 100, the next one shares one with it.
        assert len(concurrent_shards(sampler, 64, 0, rank, 4)) <= 4 * (4 + 3)


@pytest.mark.parametrize(
    ("first", "second"), [((1,), ("1",)), (("a", "bc"), ("ab", "c")), (("a", "b"), ("b", "a"))]
)
def test_identities_keep_names_apart(first, second):
    assert stable_hash(*first) != stable_hash(*second)
    assert 0 <= stable_hash(*first) < 2**63


def test_draws_stay_what_they_were():
    # A run may be resumed in another process, on another machine or with a newer release.
    assert make_rng(3, 1, "s", "p").integers(10**9) == 592918018


@pytest.mark.parametrize("sample", range(20))
def test_the_key_of_philox_is_the_hash(sample):
    digest = hashlib.blake2b(repr([3, 1, sample, "crop"]).encode(), digest_size=16).digest()
    plain = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    drawn = make_rng(3, 1, sample, "crop")
    assert np.array_equal(drawn.integers(2**62, size=9), plain.integers(2**62, size=9))
    assert np.array_equal(drawn.permutation(50), plain.permutation(50))
