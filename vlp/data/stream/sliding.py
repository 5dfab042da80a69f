"""The training order for caches: shards stay with their streams, each spread over a sliding window.

Cut into streams once a run, an epoch's shards come to the same ranks in every epoch, so that a node
finds them in its cache. Within a stream they change order at each epoch, and the samples of a shard
come evenly over `window` places around its own: a stream reads from about `window` / shard size
shards at a time, opens and leaves them one by one, and takes a batch from different ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vlp.data.shards.lru import LRUCache
from vlp.data.stream.rng import make_rng
from vlp.data.stream.sampler import EpochLayout, Pool, TrainingSampler

_BLOCKS = 8
"""Blocks of a window. A stream is sorted block by block, and shards are fetched a block ahead."""


class _Stream(NamedTuple):
    """The chunks of a stream, and how many elements of each come in which block."""

    starts: np.ndarray  # place of each chunk's first element; at the end, the stream's length
    opened: np.ndarray  # block in which each chunk's first element may come
    taken: list[np.ndarray]  # elements of each chunk up to the end of each block from there on
    ends: np.ndarray  # elements of the stream up to the end of each block


class SlidingSampler(TrainingSampler):
    """Shards that are dealt to streams once a run and read through a sliding window.

    The elements of a chunk with middle m, in random order, come evenly in [m - window/2,
    m + window/2] of a time line as long as the stream, cut off at its ends. The line is cut into
    blocks of an eighth of a window, in each of which a chunk's elements are evenly spread.

    A source of a weight that is no whole number has other shards in the next epoch, which moves the
    streams' borders by few shards.
    """

    def __init__(self, pools: Sequence[Pool], streams: int, window: int, seed: int) -> None:
        super().__init__(pools, streams, window, seed)
        self._laid_out: LRUCache[_Stream] = LRUCache(2 * streams)

    @property
    def prefetch_window(self) -> int:
        """Elements of a stream whose shards are fetched while those before are read: a block."""
        return max(1, self.window // _BLOCKS)

    def shards_of_window(
        self, epoch: int, number: int, rank: int = 0, world_size: int = 1
    ) -> list[tuple[int, int]]:
        """List the shards one rank reads while its streams go through their window `number`.

        Returns:
            (source, shard) pairs, each once, stream by stream; none where the epoch has ended.
        """
        own = self._own(rank, world_size)
        found: dict[tuple[int, int], None] = {}
        for first, stream in zip(self._bounds(epoch, own).tolist(), own):
            laid = self._stream(epoch, stream)
            start = number * self.prefetch_window
            stop = min(start + self.prefetch_window, int(laid.starts[-1]))
            for block in _blocks(laid, start, stop):
                for chunk in _open_chunks(laid, block):
                    place = first + int(laid.starts[chunk])
                    found.update(dict.fromkeys(self._epoch(epoch).shards(place, place + 1)))
        return list(found)

    def _lay_out(self, epoch: int) -> EpochLayout:
        chunks = self._chunks(epoch)
        keys = [
            make_rng(self.seed, 0, source, "deal").random(len(sizes))
            for source, sizes in enumerate(self._sizes)
        ]
        dealt = [keys[source][shard] for source, shard in chunks[:2].T.tolist()]
        chunks = chunks[:, np.lexsort((chunks[3], dealt))]
        ends, bounds = np.cumsum(chunks[4]), self._bounds(epoch, range(self.streams))
        cuts = np.union1d(ends, bounds[bounds > 0])  # where a chunk or a stream ends
        begins, cut = np.append(0, cuts[:-1]), np.searchsorted(ends, cuts)
        pieces = chunks[:, cut]
        pieces[2] += begins - (ends - chunks[4])[cut]
        pieces[4] = cuts - begins
        mixed = make_rng(self.seed, epoch, "epoch", "chunks").random(len(cuts))
        return EpochLayout(pieces[:, np.lexsort((mixed, np.searchsorted(bounds, cuts)))])

    def _shuffled(self, epoch: int, stream: int, start: int, stop: int, length: int) -> np.ndarray:
        """Return places in a stream of `length` elements of what comes at `start` to `stop`."""
        laid = self._stream(epoch, stream)
        parts = [np.empty(0, dtype=np.int64)]
        for block in _blocks(laid, start, stop):
            before = int(laid.ends[block - 1]) if block else 0
            inside = slice(max(0, start - before), max(0, stop - before))
            parts.append(self._block(epoch, stream, block)[inside])
        return np.concatenate(parts)

    def _stream(self, epoch: int, stream: int) -> _Stream:
        return self._laid_out.get((epoch, stream), lambda: self._time_line(epoch, stream))

    def _time_line(self, epoch: int, stream: int) -> _Stream:
        first, stop = self._bounds(epoch, range(stream, stream + 1)).tolist()
        starts = np.append(self._epoch(epoch).starts(first, stop), stop) - first
        sizes, length, block = np.diff(starts), stop - first, self.prefetch_window
        begins = np.maximum(starts[:-1] + (sizes - self.window) / 2, 0)
        ends = np.minimum(starts[:-1] + (sizes + self.window) / 2, length)
        opened = (begins // block).astype(np.int64)
        shifts = make_rng(self.seed, epoch, stream, "shifts").random(len(sizes))
        counts = np.zeros(-(-length // block), dtype=np.int64)
        taken = []
        for begin, end, size, shift, number in zip(begins, ends, sizes, shifts, opened.tolist()):
            times = np.arange(number + 1, int(-(-end // block)) + 1) * block
            came = np.ceil((times - begin) * size / (end - begin) - shift)
            came = np.clip(came, 0, size).astype(np.int64)
            came[-1] = size
            counts[number : number + len(came)] += np.diff(came, prepend=0)
            taken.append(came)
        return _Stream(starts, opened, taken, np.cumsum(counts))

    def _block(self, epoch: int, stream: int, block: int) -> np.ndarray:
        """Return the places, in their order, of what comes in a block."""
        known = self._windows.get(stream)
        if known is None or known[0] != (epoch, block):
            known = self._windows[stream] = (epoch, block), self._sorted(epoch, stream, block)
        return known[1]

    def _sorted(self, epoch: int, stream: int, block: int) -> np.ndarray:
        laid = self._stream(epoch, stream)
        times, places = [np.empty(0)], [np.empty(0, dtype=np.int64)]
        for chunk in _open_chunks(laid, block):
            inside, came = block - int(laid.opened[chunk]), laid.taken[chunk]
            start, stop = int(came[inside - 1]) if inside else 0, int(came[inside])
            rng = make_rng(self.seed, epoch, stream, f"chunk {chunk}")
            order = rng.permutation(int(came[-1]))[start:stop]
            within = rng.random(int(came[-1]))[start:stop]
            times.append((np.arange(stop - start) + within) / max(1, stop - start))
            places.append(laid.starts[chunk] + order)
        return np.concatenate(places)[np.argsort(np.concatenate(times), kind="stable")]


def _blocks(laid: _Stream, start: int, stop: int) -> range:
    """Return the blocks in which the elements from `start` to `stop` of a stream come."""
    if start >= stop:
        return range(0)
    low, high = np.searchsorted(laid.ends, [start, stop - 1], side="right").tolist()
    return range(low, high + 1)


def _open_chunks(laid: _Stream, block: int) -> Iterator[int]:
    """Yield the chunks of which elements may come in a block; they lie side by side."""
    for chunk in range(int(np.searchsorted(laid.opened, block, side="right")) - 1, -1, -1):
        if block - int(laid.opened[chunk]) >= len(laid.taken[chunk]):
            return
        yield chunk
