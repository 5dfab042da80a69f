"""The training order: a function of seed, epoch, streams, window, shard sizes and source weights.

An epoch's shards, in random order, form one sequence of samples, cut into `streams` equal streams
that are shuffled within windows. A global batch has equally many samples of each stream, and ranks
share the streams, so that global batches do not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from vlp.config import ConfigError
from vlp.data.shards.index import LRUCache, smallest_ints
from vlp.data.stream.rng import make_rng


class Source(NamedTuple):
    """The number of samples (or pairs, with `captions: all`) in each shard, and the weight."""

    sizes: Sequence[int] | np.ndarray
    weight: float = 1.0


class SampleIndex(NamedTuple):
    """A sample (or pair) by its position in a shard, and the earlier passes over its source."""

    source: int
    shard: int
    position: int
    source_pass: int


class Request(NamedTuple):
    """Epoch and sample of a row of a batch; `sample_index` is None for an empty row."""

    epoch: int
    sample_index: SampleIndex | None


class GlobalBatch(NamedTuple):
    """A global batch: its epoch, the position of each stream, samples consumed after the batch."""

    epoch: int
    start: int
    consumed: int


def streams_of_rank(streams: int, rank: int, world_size: int) -> range:
    """Return the streams of a rank, the same number for all ranks."""
    if streams % world_size:
        divisors = [ranks for ranks in range(1, streams + 1) if streams % ranks == 0]
        fewer = max(ranks for ranks in divisors if ranks < world_size)
        more = [f" or {ranks}" for ranks in divisors if ranks > world_size][:1]
        raise ConfigError(
            f"{world_size} ranks cannot share data.canonical_streams {streams} evenly; "
            f"{fewer}{''.join(more)} can"
        )
    per_rank = streams // world_size
    return range(rank * per_rank, (rank + 1) * per_rank)


def require_equal_streams(batch: int, streams: int, section: str = "data") -> None:
    """Refuse a global batch that is no multiple of `streams`, a key of `section`."""
    if batch % streams:
        key, fewer = f"{section}.canonical_streams", math.gcd(batch, streams)
        raise ConfigError(
            f"training.batch {batch} is not a multiple of {key} {streams}; set "
            f"training.batch={batch + -batch % streams}, or {key}={fewer}"
        )


class TrainingSampler:
    """Sampler of every epoch's samples, by streams that are shuffled within windows.

    Epoch e reads floor((e+1)·w·n) - floor(e·w·n) of the n samples of a source of weight w, from
    where epoch e - 1 stopped. The number of ranks divides `streams`; `window` is in samples.
    """

    def __init__(self, sources: Sequence[Source], streams: int, window: int, seed: int) -> None:
        self.streams = streams
        self.window = window
        self.seed = seed
        self._sizes = [smallest_ints(source.sizes) for source in sources]
        self._totals = [int(sizes.sum()) for sizes in self._sizes]
        # Weights are decimal: 0.1 is a tenth, not the nearest binary fraction.
        self._weights = [Fraction(source.weight).limit_denominator(10**6) for source in sources]
        if not any(total * weight for total, weight in zip(self._totals, self._weights)):
            raise ConfigError("the sources hold no samples")
        self._layouts: LRUCache[EpochLayout] = LRUCache(2)
        # By stream: (epoch, window number) and shuffled order of its last window; streams never go
        # back.
        self._orders: dict[int, tuple[tuple[int, int], np.ndarray]] = {}
        self._position_type = np.min_scalar_type(window)

    @property
    def prefetch_unit(self) -> int:
        """Samples of a stream that are prefetched together: a window."""
        return self.window

    def samples_before(self, epoch: int) -> int:
        """Return the number of samples of all epochs before `epoch`."""
        return sum(
            int(epoch * weight * total) for total, weight in zip(self._totals, self._weights)
        )

    def samples_in_epoch(self, epoch: int) -> int:
        """Return the number of samples of one epoch."""
        return self.samples_before(epoch + 1) - self.samples_before(epoch)

    def batches_in_epoch(self, epoch: int, size: int) -> int:
        """Return the number of global batches of one epoch; the last one may have empty rows."""
        longest = -(-self.samples_in_epoch(epoch) // self.streams)
        return -(-longest // self._per_stream(size))

    def samples_of_rank(self, epoch: int, rank: int, world_size: int) -> int:
        """Return the number of samples of one epoch that fall to one rank."""
        bounds = self._bounds(epoch, streams_of_rank(self.streams, rank, world_size))
        return int(bounds[-1] - bounds[0])

    def locate(self, consumed: int) -> tuple[int, int]:
        """Return the epoch, and each stream's position in it, after `consumed` samples."""
        low, high = 0, 1
        while self.samples_before(high) <= consumed:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if self.samples_before(middle) <= consumed:
                low = middle
            else:
                high = middle
        within = consumed - self.samples_before(low)
        if consumed < 0 or within % self.streams:
            raise ConfigError(
                f"cannot continue after {consumed} samples: with these sources and "
                f"data.canonical_streams {self.streams} no batch ends there"
            )
        return low, within // self.streams

    def global_batches(self, consumed: int, size: int) -> Iterator[GlobalBatch]:
        """Yield the global batches of `size` rows after `consumed` samples, without end."""
        per_stream = self._per_stream(size)
        epoch, start = self.locate(consumed)
        while True:
            samples = self.samples_in_epoch(epoch)
            before = self.samples_before(epoch)
            longest = -(-samples // self.streams)
            while start < longest:
                after = start + per_stream
                done = samples if after >= longest else after * self.streams
                yield GlobalBatch(epoch, start, before + done)
                start = after
            epoch, start = epoch + 1, 0

    def rows(
        self, epoch: int, start: int, size: int, rank: int = 0, world_size: int = 1
    ) -> list[SampleIndex | None]:
        """Return a rank's (contiguous) rows of a global batch; None for an empty row."""
        per_stream = self._per_stream(size)
        streams = streams_of_rank(self.streams, rank, world_size)
        bounds = self._bounds(epoch, streams)
        positions = np.full((len(streams), per_stream), -1)  # in the epoch's sequence; -1: empty
        for row, stream, first, length in zip(positions, streams, bounds, np.diff(bounds).tolist()):
            stop = min(start + per_stream, length)
            row[: max(0, stop - start)] = first + self._order(epoch, stream, start, stop, length)
        has_sample = positions >= 0
        samples = iter(self._layout(epoch).samples(positions[has_sample]))
        return [next(samples) if present else None for present in has_sample.ravel()]

    def shards_of_unit(
        self, epoch: int, unit: int, rank: int = 0, world_size: int = 1
    ) -> list[tuple[int, int]]:
        """List the (source, shard) pairs of a rank's prefetch unit; empty after the epoch's end."""
        bounds = self._bounds(epoch, streams_of_rank(self.streams, rank, world_size))
        starts = bounds[:-1] + unit * self.window
        stops = np.minimum(starts + self.window, bounds[1:])
        layout = self._layout(epoch)
        shards: dict[tuple[int, int], None] = {}
        for start, stop in zip(starts.tolist(), stops.tolist()):
            shards.update(dict.fromkeys(layout.shards(start, stop)))
        return list(shards)

    def units_in_epoch(self, epoch: int) -> int:
        """Return the number of prefetch units of the longest stream."""
        longest = -(-self.samples_in_epoch(epoch) // self.streams)
        return -(-longest // self.prefetch_unit)

    def _per_stream(self, size: int) -> int:
        require_equal_streams(size, self.streams)
        return size // self.streams

    def _bounds(self, epoch: int, streams: range) -> np.ndarray:
        """Return the starts of consecutive streams in the epoch's sequence, and the last stop."""
        indices = np.arange(streams.start, streams.stop + 1)
        return indices * self.samples_in_epoch(epoch) // self.streams

    def _order(self, epoch: int, stream: int, start: int, stop: int, length: int) -> np.ndarray:
        """Return entries [start, stop) of the shuffled order, as positions in the stream."""
        parts = [np.empty(0, dtype=np.int64)]
        while start < stop:
            window_index, offset = divmod(start, self.window)
            first = window_index * self.window
            count = min(self.window, stop - first) - offset
            size = min(self.window, length - first)
            permutation = self._permutation(epoch, stream, window_index, size)
            parts.append(first + permutation[offset : offset + count].astype(np.int64))
            start += count
        return np.concatenate(parts)

    def _permutation(self, epoch: int, stream: int, window_index: int, size: int) -> np.ndarray:
        key, permutation = self._orders.get(stream, (None, None))
        if key != (epoch, window_index) or permutation is None:
            rng = make_rng(self.seed, epoch, stream, f"window {window_index}")
            permutation = rng.permutation(size).astype(self._position_type)
            self._orders[stream] = (epoch, window_index), permutation
        return permutation

    def _layout(self, epoch: int) -> EpochLayout:
        return self._layouts.get(epoch, lambda: self._new_layout(epoch))

    def _new_layout(self, epoch: int) -> EpochLayout:
        chunks = self._chunks(epoch)
        return EpochLayout(
            chunks[:, make_rng(self.seed, epoch, "epoch", "chunks").permutation(chunks.shape[1])]
        )

    def _chunks(self, epoch: int) -> np.ndarray:
        """Return the chunks (runs of one shard) that an epoch reads, (5, chunks) of `EpochLayout`.

        Passes over a source follow each other without a gap, and an epoch may start within one.
        """
        parts = []
        for source, (sizes, total, weight) in enumerate(
            zip(self._sizes, self._totals, self._weights)
        ):
            start, stop = int(epoch * weight * total), int((epoch + 1) * weight * total)
            for source_pass in range(start // total, -(-stop // total)) if total else ():
                rng = make_rng(self.seed, source_pass, source, "shards")
                shards = rng.permutation(len(sizes))
                # Bounds of the shards, and of the part of each that the epoch reads.
                shard_stops = np.cumsum(sizes[shards]) + source_pass * total
                shard_starts = shard_stops - sizes[shards]
                starts, stops = np.maximum(shard_starts, start), np.minimum(shard_stops, stop)
                sources, passes = np.full_like(shards, source), np.full_like(shards, source_pass)
                chunks = np.stack([sources, shards, starts - shard_starts, passes, stops - starts])
                parts.append(chunks[:, starts < stops])
        return np.concatenate(parts, axis=1)


class EndlessSampler:
    """Sampler of an endless stream in batches of `size`; an epoch has at least `epoch_samples`."""

    def __init__(self, epoch_samples: int, size: int) -> None:
        self._batches = -(-epoch_samples // size)
        self._size = size

    def samples_in_epoch(self, epoch: int) -> int:
        """Return the number of samples of one epoch."""
        return self._batches * self._size

    def batches_in_epoch(self, epoch: int, size: int) -> int:
        """Return the number of global batches of one epoch."""
        return -(-self.samples_in_epoch(epoch) // size)

    def samples_of_rank(self, epoch: int, rank: int, world_size: int) -> int:
        """Return the number of samples of one epoch that fall to one rank."""
        if self._size % world_size:
            raise ConfigError(f"{world_size} ranks cannot share a batch of {self._size} evenly")
        return self.samples_in_epoch(epoch) // world_size

    def locate(self, consumed: int) -> tuple[int, int]:
        """Return the epoch, and the samples consumed of it, after `consumed` samples."""
        return divmod(consumed, self.samples_in_epoch(0))

    def global_batches(self, consumed: int, size: int) -> Iterator[GlobalBatch]:
        """Yield the global batches of `size` rows after `consumed` samples, without end."""
        while True:
            epoch, start = self.locate(consumed)
            consumed += size
            yield GlobalBatch(epoch, start, consumed)


class EpochLayout:
    """The chunks of an epoch in order, as rows (source, shard, first position, pass, length)."""

    def __init__(self, chunks: np.ndarray) -> None:
        self._chunks = [smallest_ints(row) for row in chunks]
        self._ends = np.cumsum(chunks[4])

    def shards(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return (source, shard) of the chunks that overlap [start, stop) of the sequence."""
        if start >= stop:
            return []
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right")
        return list(zip(*(row[first : last + 1].tolist() for row in self._chunks[:2])))

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Return the starts of the chunks in [start, stop); both bounds are borders of chunks."""
        first, last = np.searchsorted(self._ends, [start, stop], side="right")
        return self._ends[first:last] - self._chunks[4][first:last]

    def samples(self, positions: np.ndarray) -> list[SampleIndex]:
        """Return the samples at positions of the sequence."""
        chunks = np.searchsorted(self._ends, positions, side="right")
        source, shard, first, source_pass, length = (row[chunks] for row in self._chunks)
        position = first + positions - (self._ends[chunks] - length)
        columns = np.stack([source, shard, position, source_pass], axis=1)
        return [SampleIndex(*row) for row in columns.tolist()]


_BLOCKS = 8  # blocks of a window, by which a stream is shuffled and prefetched


class _Timeline(NamedTuple):
    """The chunks of a stream, and the number of samples of each chunk by block."""

    starts: np.ndarray  # (chunks + 1,) position of each chunk's first sample; the stream's length
    first_blocks: np.ndarray  # (chunks,) first block that may have samples of the chunk
    # For each chunk, (its blocks,) its samples up to the end of each block, from `first_blocks` on.
    cumulative: list[np.ndarray]
    ends: np.ndarray  # (blocks,) samples of the stream up to the end of each block


class SlidingSampler(TrainingSampler):
    """Sampler that assigns shards to streams once per run and spreads them over a sliding window.

    Ranks read the same shards in every epoch (for their caches), in another order. A stream reads
    from about `window` / shard size shards at a time. A chunk with its middle at m spreads its
    samples evenly over [m - window/2, m + window/2], in blocks of an eighth of a window.
    """

    def __init__(self, sources: Sequence[Source], streams: int, window: int, seed: int) -> None:
        super().__init__(sources, streams, window, seed)
        self._timelines: LRUCache[_Timeline] = LRUCache(2 * streams)

    @property
    def prefetch_unit(self) -> int:
        """Samples of a stream that are prefetched together: a block."""
        return max(1, self.window // _BLOCKS)

    def shards_of_unit(
        self, epoch: int, unit: int, rank: int = 0, world_size: int = 1
    ) -> list[tuple[int, int]]:
        """List the (source, shard) pairs of a rank's prefetch unit."""
        streams = streams_of_rank(self.streams, rank, world_size)
        shards: dict[tuple[int, int], None] = {}
        for first, stream in zip(self._bounds(epoch, streams).tolist(), streams):
            timeline = self._timeline(epoch, stream)
            start = unit * self.prefetch_unit
            stop = min(start + self.prefetch_unit, int(timeline.starts[-1]))
            for block in _blocks(timeline, start, stop):
                for chunk in _open_chunks(timeline, block):
                    position = first + int(timeline.starts[chunk])
                    shards.update(dict.fromkeys(self._layout(epoch).shards(position, position + 1)))
        return list(shards)

    def _new_layout(self, epoch: int) -> EpochLayout:
        chunks = self._chunks(epoch)
        # Keys do not depend on the epoch: a shard stays in its stream and its rank's cache.
        # Fractional weights move the borders of streams by few shards.
        keys = [
            make_rng(self.seed, 0, source, "deal").random(len(sizes))
            for source, sizes in enumerate(self._sizes)
        ]
        sort_keys = [keys[source][shard] for source, shard in chunks[:2].T.tolist()]
        chunks = chunks[:, np.lexsort((chunks[3], sort_keys))]
        # Cut the chunks that reach over the border of two streams.
        ends, bounds = np.cumsum(chunks[4]), self._bounds(epoch, range(self.streams))
        stops = np.union1d(ends, bounds[bounds > 0])
        starts, chunk_of_part = np.append(0, stops[:-1]), np.searchsorted(ends, stops)
        parts = chunks[:, chunk_of_part]
        parts[2] += starts - (ends - chunks[4])[chunk_of_part]
        parts[4] = stops - starts
        # Shuffle the parts within each stream.
        shuffle_keys = make_rng(self.seed, epoch, "epoch", "chunks").random(len(stops))
        return EpochLayout(parts[:, np.lexsort((shuffle_keys, np.searchsorted(bounds, stops)))])

    def _order(self, epoch: int, stream: int, start: int, stop: int, length: int) -> np.ndarray:
        """Return entries [start, stop) of the shuffled order, as positions in the stream."""
        timeline = self._timeline(epoch, stream)
        parts = [np.empty(0, dtype=np.int64)]
        for block in _blocks(timeline, start, stop):
            before = int(timeline.ends[block - 1]) if block else 0
            entries = slice(max(0, start - before), max(0, stop - before))
            parts.append(self._block(epoch, stream, block)[entries])
        return np.concatenate(parts)

    def _timeline(self, epoch: int, stream: int) -> _Timeline:
        return self._timelines.get((epoch, stream), lambda: self._new_timeline(epoch, stream))

    def _new_timeline(self, epoch: int, stream: int) -> _Timeline:
        first, stop = self._bounds(epoch, range(stream, stream + 1)).tolist()
        starts = np.append(self._layout(epoch).starts(first, stop), stop) - first
        sizes, length, block = np.diff(starts), stop - first, self.prefetch_unit
        begins = np.maximum(starts[:-1] + (sizes - self.window) / 2, 0)
        ends = np.minimum(starts[:-1] + (sizes + self.window) / 2, length)
        first_blocks = (begins // block).astype(np.int64)
        # Random rounding: rounded up alone, every chunk would have a sample in its first block.
        shifts = make_rng(self.seed, epoch, stream, "shifts").random(len(sizes))
        counts = np.zeros(-(-length // block), dtype=np.int64)
        cumulative = []
        columns = zip(begins, ends, sizes, shifts, first_blocks.tolist())
        for begin, end, size, shift, first_block in columns:
            block_ends = np.arange(first_block + 1, int(-(-end // block)) + 1) * block
            totals = np.ceil((block_ends - begin) * size / (end - begin) - shift)
            totals = np.clip(totals, 0, size).astype(np.int64)
            totals[-1] = size
            counts[first_block : first_block + len(totals)] += np.diff(totals, prepend=0)
            cumulative.append(totals)
        return _Timeline(starts, first_blocks, cumulative, np.cumsum(counts))

    def _block(self, epoch: int, stream: int, block: int) -> np.ndarray:
        """Return a block's samples in shuffled order, as positions in the stream."""
        cached = self._orders.get(stream)
        if cached is None or cached[0] != (epoch, block):
            positions = self._shuffle_block(epoch, stream, block)
            cached = self._orders[stream] = (epoch, block), positions
        return cached[1]

    def _shuffle_block(self, epoch: int, stream: int, block: int) -> np.ndarray:
        timeline = self._timeline(epoch, stream)
        sort_keys, positions = [np.empty(0)], [np.empty(0, dtype=np.int64)]
        for chunk in _open_chunks(timeline, block):
            offset = block - int(timeline.first_blocks[chunk])
            counts = timeline.cumulative[chunk]
            start, stop = int(counts[offset - 1]) if offset else 0, int(counts[offset])
            rng = make_rng(self.seed, epoch, stream, f"chunk {chunk}")
            order = rng.permutation(int(counts[-1]))[start:stop]
            within = rng.random(int(counts[-1]))[start:stop]
            sort_keys.append((np.arange(stop - start) + within) / max(1, stop - start))
            positions.append(timeline.starts[chunk] + order)
        return np.concatenate(positions)[np.argsort(np.concatenate(sort_keys), kind="stable")]


def _blocks(timeline: _Timeline, start: int, stop: int) -> range:
    """Return the blocks that hold the samples [start, stop) of a stream."""
    if start >= stop:
        return range(0)
    low, high = np.searchsorted(timeline.ends, [start, stop - 1], side="right").tolist()
    return range(low, high + 1)


def _open_chunks(timeline: _Timeline, block: int) -> Iterator[int]:
    """Yield the (consecutive) chunks that may have samples in a block."""
    stop = int(np.searchsorted(timeline.first_blocks, block, side="right"))
    for chunk in reversed(range(stop)):
        if block - int(timeline.first_blocks[chunk]) >= len(timeline.cumulative[chunk]):
            return  # earlier chunks have ended, too
        yield chunk
