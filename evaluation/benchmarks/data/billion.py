"""A billion samples on a thousand ranks, as one of their loader workers meets them.

    OMP_NUM_THREADS=1 python -m evaluation.benchmarks.data.billion

Makes a folder of 100,000 shards of 10,000 samples each. Its index and its file of samples are what
such a corpus has; all shards are links to one real tar of small images, and of the file of
samples only the rows that are read are written. A fresh process then takes the place of one rank of
1,024: it opens the index, starts a worker and waits for the first batch, from the start of the run
and again from a random point, as a resumed run does.

How well the order mixes, and what a node has to read, is worked out from the order itself, and set
beside what a uniform shuffle of all samples would give. Prints a table and, last, one JSON line per
figure. Bytes are those of images of `--sample-bytes`.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from data_tools.executor.local import LocalExecutor
from evaluation.benchmarks import harness
from evaluation.benchmarks.harness import Measurement
from vlp.data.config import DataConfig, SourceConfig
from vlp.data.pretrain.loader import PretrainData
from vlp.data.schema import Annotation
from vlp.data.shards.index import ROW, ShardEntry, write_table
from vlp.data.shards.shard_index import ShardIndex, ShardWriter
from vlp.data.stream.batch_sampler import read_at_once
from vlp.data.stream.input_spec import Inputs
from vlp.data.stream.sampler import Pool, TrainingSampler
from vlp.data.text.tokenizer import TextProcessor, train_wordpiece

SEED = 0
ONE = "one"  # the folder of the real shard
CORPUS = "corpus"
TABLE = "samples-0.npy"


class Scale(NamedTuple):
    """Size of the corpus and of the run.

    batch: slots of a global batch; window: samples of a stream that are shuffled at a time; nodes
    hold `ranks_per_node` ranks of `workers` workers each.
    """

    shards: int = 100_000
    shard_samples: int = 10_000
    ranks: int = 1024
    ranks_per_node: int = 8
    workers: int = 8
    streams: int = 8192
    batch: int = 32_768
    window: int = 4096
    sample_bytes: int = 30_000

    @property
    def samples(self) -> int:
        """Of the whole corpus."""
        return self.shards * self.shard_samples

    def sampler(self) -> TrainingSampler:
        """The training order of the corpus."""
        sizes = np.full(self.shards, self.shard_samples)
        return TrainingSampler([Pool(sizes)], self.streams, self.window, SEED)

    def random_place(self) -> int:
        """Samples after which a run may have stopped, somewhere in the first epoch."""
        batches = self.sampler().batches_in_epoch(0, self.batch)
        return int(np.random.default_rng(SEED).integers(1, batches)) * self.batch


class Start(NamedTuple):
    """One rank with one worker: seconds, and bytes of memory.

    opened: the index; laid_out: everything else before the loader; first: from then on to the first
    batch, as is resumed from a random place. of_index: what the index alone adds to the main
    process; added: what index and order add; worker: of one worker, and the part that it shares
    with no other process.
    """

    opened: float
    laid_out: float
    first: float
    resumed: float
    of_index: int
    added: int
    worker: int
    worker_own: int


class Mixing(NamedTuple):
    """Statistics of the order, each beside its expectation under a uniform shuffle.

    displacement: mean distance between a sample's place in the corpus and its place in the epoch,
    as a share of the epoch. pairs: share of the pairs of a global batch that come from one shard.
    distinct: shards in a global batch. span: part of the epoch over which a shard's samples come.
    """

    displacement: tuple[float, float]
    pairs: tuple[float, float]
    distinct: tuple[float, float]
    span: tuple[float, float]


class Reading(NamedTuple):
    """Reading load of a node and a rank: shards of an epoch, and shards at a time."""

    node: int
    rank: int
    rank_at_once: int


def make_corpus(folder: Path, scale: Scale, rank: int) -> None:
    """Write one shard, all links to it, the index, and the rows that `rank` is going to read."""
    stream = io.BytesIO()
    noise = np.random.default_rng(SEED).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(stream, "jpeg")
    with ShardWriter(folder / ONE, scale.shard_samples) as writer:
        for number in range(scale.shard_samples):
            annotation = Annotation(caption=f"noise number {number}", image_id=str(number))
            writer.write(f"{number:06d}", stream.getvalue(), "jpg", annotation)
    real = ShardIndex.open(folder / ONE)
    rows, entry = real.require_captions(), real.shards[0]
    corpus = folder / CORPUS
    corpus.mkdir()
    names = [f"{number:06d}.tar" for number in range(scale.shards)]
    for name in names:
        (corpus / name).symlink_to(folder / ONE / entry.name)
    write_table(corpus, (ShardEntry(name, *entry[1:]) for name in names), TABLE)
    # A file with holes: what is not written takes no room.
    table = np.lib.format.open_memmap(corpus / TABLE, "w+", ROW, (scale.samples,))
    sampler = scale.sampler()
    for consumed in (0, scale.random_place()):
        for _, shard in read_at_once(sampler, scale.batch, consumed, rank, scale.ranks):
            first = shard * scale.shard_samples
            table[first : first + scale.shard_samples] = rows
    table.flush()


def start_one(folder: Path, scale: Scale, rank: int) -> Start:
    """Be one rank with one worker until its first batch; wants a process of its own."""
    # A spawned process spawns in its turn; a rank forks its workers.
    multiprocessing.set_start_method("fork", force=True)
    text = TextProcessor(train_wordpiece(["noise number 0123456789"], 60), 8)
    inputs = Inputs(32, (4, 4), 8, text.vocab_size, word_masking=0.15)
    source = str(folder / CORPUS)
    before = _memory("self")[0]
    started = time.perf_counter()
    index = ShardIndex.open(source)
    opened = time.perf_counter() - started
    of_index = _memory("self")[0] - before
    del index
    started = time.perf_counter()
    config = DataConfig(
        sources=(SourceConfig(path=source),),
        canonical_streams=scale.streams,
        shuffle_window=scale.window,
        workers=1,
    )
    data = PretrainData(config, inputs, scale.batch, SEED, text)
    data.sampler.share(0, rank, scale.ranks)
    laid_out = time.perf_counter() - started - opened
    seconds, grown, memory = [], 0, (0, 0)
    for consumed in (0, scale.random_place()):
        started = time.perf_counter()
        batches = data.batches(consumed, rank, scale.ranks)
        batch, _ = next(batches)
        seconds.append(time.perf_counter() - started)
        if not batch.valid.all():
            raise AssertionError(f"a good corpus gives bad samples: {batch.skipped[0]}")
        [worker] = multiprocessing.active_children()
        memory = max(memory, _memory(str(worker.pid)))
        grown = max(grown, _memory("self")[0] - before)
        batches.close()
    first, resumed = seconds
    return Start(opened, max(0.0, laid_out), first, resumed, of_index, grown, *memory)


def _memory(process: str) -> tuple[int, int]:
    """Bytes of a process that are resident, and those that it shares with no other."""
    fields: Counter[str] = Counter()
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        fields[name] = 1024 * int(rest.split()[0])
    return fields["Rss"], fields["Private_Clean"] + fields["Private_Dirty"]


def mixing(scale: Scale, lookups: int = 1000) -> Mixing:
    """Statistics of the order of the first epoch.

    Args:
        scale: of corpus and run.
        lookups: random (batch, rank) pairs whose samples are looked at.
    """
    sampler, rng = scale.sampler(), np.random.default_rng(SEED)
    batches = sampler.batches_in_epoch(0, scale.batch)
    each = scale.batch // scale.ranks
    per_stream = scale.batch // scale.streams
    distances = []
    for _ in range(lookups):
        batch, rank = int(rng.integers(batches - 1)), int(rng.integers(scale.ranks))
        slots = sampler.slots(0, batch * per_stream, scale.batch, rank, scale.ranks)
        for number, element in enumerate(slots):
            assert element is not None  # no batch but the last has empty slots
            comes = batch * scale.batch + rank * each + number
            lies = element.shard * scale.shard_samples + element.position
            distances.append(abs(comes - lies) / scale.samples)
    whole = sampler.slots(0, int(rng.integers(batches - 1)) * per_stream, scale.batch)
    counts = Counter(element.shard for element in whole if element is not None)
    pairs = sum(count * (count - 1) for count in counts.values())
    size, samples, shards = scale.batch, scale.samples, scale.shards
    return Mixing(
        (float(np.mean(distances)), 1 / 3),
        (pairs / (size * (size - 1)), (scale.shard_samples - 1) / (samples - 1)),
        (float(len(counts)), shards * (1 - (1 - 1 / shards) ** size)),
        (_span(scale, sampler), 1 - 2 / (scale.shard_samples + 1)),
    )


def _span(scale: Scale, sampler: TrainingSampler) -> float:
    """Mean part of the epoch between a shard's first and last sample, over the windows' bounds.

    A shard lies in one stream or in two, and there in one window or in several.
    """
    length = -(-scale.samples // scale.streams)
    starts = np.arange(0, scale.samples, scale.shard_samples)
    stops = starts + scale.shard_samples - 1
    first, last = starts * scale.streams // scale.samples, stops * scale.streams // scale.samples
    first_window = (starts - first * scale.samples // scale.streams) // scale.window
    last_window = (stops - last * scale.samples // scale.streams) // scale.window
    within = np.minimum((last_window + 1) * scale.window, length) - first_window * scale.window
    # In two streams: the end of one and the start of the next, most of an epoch apart.
    return float(np.where(first == last, np.minimum(within, length), length).mean() / length)


def reading(scale: Scale) -> Reading:
    """Shards of one node and of one rank: the mean of a few of each."""
    sampler = scale.sampler()
    windows = sampler.windows_in_epoch(0)

    def opened(rank: int, ranks: int) -> int:
        return len(
            {
                s
                for window in range(windows)
                for s in sampler.shards_of_window(0, window, rank, ranks)
            }
        )

    nodes = scale.ranks // scale.ranks_per_node
    some = np.random.default_rng(SEED).permutation(scale.ranks)[:8]
    at_once = [len(read_at_once(sampler, scale.batch, 0, int(r), scale.ranks)) for r in some]
    return Reading(
        round(np.mean([opened(int(r) % nodes, nodes) for r in some])),
        round(np.mean([opened(int(r), scale.ranks) for r in some])),
        round(np.mean(at_once)),
    )


def table(scale: Scale, start: Start, mixed: Mixing, read: Reading) -> str:
    """All of it, for reading."""
    shard_bytes = scale.shard_samples * scale.sample_bytes
    rows = [
        ("index opened", f"{start.opened:.2f} s"),
        ("run laid out", f"{start.laid_out:.2f} s"),
        ("first batch of a worker", f"{start.first:.2f} s"),
        ("first batch from a random place", f"{start.resumed:.2f} s"),
        ("index in memory", f"{start.of_index / 1e6:.0f} MB"),
        ("index and order in memory", f"{start.added / 1e6:.0f} MB"),
        ("worker, resident", f"{start.worker / 1e6:.0f} MB"),
        ("worker, its own", f"{start.worker_own / 1e6:.0f} MB"),
        ("shards a node opens in an epoch", f"{read.node:,} of {scale.shards:,}"),
        ("bytes a node reads in an epoch", f"{read.node * shard_bytes / 1e12:.2f} TB"),
        ("shards a rank opens in an epoch", f"{read.rank:,}"),
        ("shards of a rank at a time", f"{read.rank_at_once} ({_gigabytes(scale, read):.1f} GB)"),
    ]
    names = (
        "mean displacement, of an epoch",
        "pairs of a batch from one shard",
        "shards in a global batch",
        "a shard's span, of an epoch",
    )
    mixes = [
        (name, f"{value:,.6g}", f"{expected:,.6g}") for name, (value, expected) in zip(names, mixed)
    ]
    return "\n".join(
        [
            f"{scale.samples:,} samples, {scale.shards:,} shards, {scale.ranks:,} ranks x "
            f"{scale.workers} workers, batch {scale.batch:,}, {scale.streams:,} streams, window "
            f"{scale.window:,}",
            harness.table(["one rank", "measured"], rows),
            harness.table(["how well the sampler mixes", "measured", "uniform shuffle"], mixes),
        ]
    )


def _gigabytes(scale: Scale, read: Reading) -> float:
    return read.rank_at_once * scale.shard_samples * scale.sample_bytes / 1e9


def figures(scale: Scale, start: Start, mixed: Mixing, read: Reading) -> list[Measurement]:
    """One figure per number that somebody plans with."""
    return [
        Measurement("billion/index_open", start.opened, "s", 2.0),
        Measurement("billion/first_batch", start.first, "s", 10.0),
        Measurement("billion/resume", start.resumed, "s", 10.0),
        Measurement("billion/index_memory", start.of_index / 1e6, "MB", 50.0),
        Measurement("billion/order_memory", start.added / 1e6, "MB"),
        Measurement("billion/worker_memory", start.worker / 1e6, "MB"),
        Measurement("billion/worker_own_memory", start.worker_own / 1e6, "MB"),
        Measurement("billion/displacement", mixed.displacement[0], "of an epoch", 1 / 3),
        Measurement("billion/pairs_of_a_shard", mixed.pairs[0] / mixed.pairs[1], "x uniform"),
        Measurement("billion/shards_in_a_batch", mixed.distinct[0], "shards"),
        Measurement("billion/shard_span", mixed.span[0], "of an epoch"),
        Measurement("billion/node_shards", read.node, "shards"),
        Measurement(
            "billion/node_bytes",
            read.node * scale.shard_samples * scale.sample_bytes / 1e12,
            "TB per epoch",
        ),
        Measurement("billion/rank_at_once", _gigabytes(scale, read), "GB"),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the scale, and which rank is played."""
    for name, default in Scale._field_defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--rank", type=int, help="the rank that is played; default: one half-way")
    parser.add_argument("--folder", help="where the corpus is made; default: a temporary folder")


def run(options: argparse.Namespace, _: torch.device) -> Iterator[Measurement]:
    """Play one rank, print the table, yield the figures."""
    scale = Scale(**{name: getattr(options, name) for name in Scale._fields})
    rank = scale.ranks // 2 if options.rank is None else options.rank
    mixed, read = mixing(scale), reading(scale)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        make_corpus(Path(folder), scale, rank)
        # A process of its own, whose memory is that of a rank alone.
        alone = LocalExecutor(1, fresh=True)
        [start] = alone.map(partial(start_one, Path(folder), scale), [rank])
    print(table(scale, start, mixed, read), end="\n\n")
    yield from figures(scale, start, mixed, read)


main = partial(harness.run_benchmark, __doc__, add_options, run, cpu_only=True)


if __name__ == "__main__":
    sys.exit(main())
