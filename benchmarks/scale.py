"""Simulation of a billion samples on 1,024 ranks: sampling order, resume, collective calls.

A new process acts as one of the ranks: it opens the index, starts a worker and waits for the first
batch, from the start of the run and, as after a resume, from a random step.
"""

from __future__ import annotations

import io
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import harness
from benchmarks.harness import Figure
from benchmarks.step import random_batch
from data_tools.executor import Executor
from launch.cli.plan import meta_task
from vlp.compilation import gpu_form
from vlp.data.config import DataConfig, SourceConfig
from vlp.data.pretrain import PretrainData
from vlp.data.schema import Annotation
from vlp.data.shards.index import ROW, ShardEntry, write_table
from vlp.data.shards.shard_reader import ShardIndex, ShardWriter
from vlp.data.stream.batch import Inputs
from vlp.data.stream.loader import concurrent_shards
from vlp.data.stream.sampler import Source, TrainingSampler
from vlp.data.text.tokenizer import TextProcessor, train_wordpiece
from vlp.training.config import PretrainConfig
from vlp.training.engines.compile import checkpoint_activations

SEED = 0
# The folder of the real shard.
REAL = "one"
CORPUS = "corpus"
TABLE = "samples-0.npy"


class Scale(NamedTuple):
    """Size of the corpus and of the run."""

    shards: int = 100_000
    shard_samples: int = 10_000
    ranks: int = 1024
    ranks_per_node: int = 8
    streams: int = 8192
    # Rows of a global batch.
    batch: int = 32_768
    # Samples of a stream that are shuffled at a time.
    window: int = 4096

    @property
    def samples(self) -> int:
        """Samples of the whole corpus."""
        return self.shards * self.shard_samples

    def sampler(self) -> TrainingSampler:
        """Return the sampler of the corpus."""
        sizes = np.full(self.shards, self.shard_samples)
        return TrainingSampler([Source(sizes)], self.streams, self.window, SEED)

    def random_start(self) -> int:
        """Draw the number of samples in the first epoch after which a run is resumed."""
        batches = self.sampler().batches_in_epoch(0, self.batch)
        return int(np.random.default_rng(SEED).integers(1, batches)) * self.batch


class Start(NamedTuple):
    """Seconds and bytes of one rank with one worker."""

    # Seconds until the index is open.
    open_index: float
    # Seconds to the first batch, from the start and after a resume.
    first: float
    resume: float
    # Bytes of index and sampler in the main process.
    memory: int


class Mixing(NamedTuple):
    """Statistics of the sampling order: (value, expectation under a uniform shuffle)."""

    # Mean distance between a sample's positions in corpus and epoch, as a share of the epoch.
    displacement: tuple[float, float]
    # Share of the pairs of samples in a global batch that are from one shard.
    pairs: tuple[float, float]
    # Number of shards in a global batch.
    distinct: tuple[float, float]


def make_corpus(folder: Path, scale: Scale, rank: int) -> None:
    """Write one shard, links to it as all shards, the index, and the index rows that `rank` reads.

    All other rows of the index are a hole in a sparse file.
    """
    stream = io.BytesIO()
    noise = np.random.default_rng(SEED).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(stream, "jpeg")
    with ShardWriter(folder / REAL, scale.shard_samples) as writer:
        for number in range(scale.shard_samples):
            annotation = Annotation(caption=f"noise number {number}", image_id=str(number))
            writer.write(f"{number:06d}", stream.getvalue(), "jpg", annotation)
    real = ShardIndex.open(folder / REAL)
    rows, entry = real.require_captions(), real.shards[0]
    corpus = folder / CORPUS
    corpus.mkdir()
    names = [f"{number:06d}.tar" for number in range(scale.shards)]
    for name in names:
        (corpus / name).symlink_to(folder / REAL / entry.name)
    write_table(corpus, (ShardEntry(name, *entry[1:]) for name in names), TABLE)
    table = np.lib.format.open_memmap(corpus / TABLE, "w+", ROW, (scale.samples,))
    sampler = scale.sampler()
    for consumed in (0, scale.random_start()):
        for _, shard in concurrent_shards(sampler, scale.batch, consumed, rank, scale.ranks):
            first = shard * scale.shard_samples
            table[first : first + scale.shard_samples] = rows
    table.flush()


def start_rank(folder: Path, scale: Scale, rank: int) -> Start:
    """Run one rank with one worker until its first batch; call it in a separate process."""
    # As a rank, which forks its workers; a spawned process would spawn them.
    multiprocessing.set_start_method("fork", force=True)
    text = TextProcessor(train_wordpiece(["noise number 0123456789"], 60), 8)
    inputs = Inputs(32, (4, 4), 8, text.vocab_size, word_masking=0.15)
    source = str(folder / CORPUS)
    before, start = _resident_bytes(), time.perf_counter()
    ShardIndex.open(source)
    index_seconds = time.perf_counter() - start
    config = DataConfig(
        sources=(SourceConfig(path=source),),
        canonical_streams=scale.streams,
        shuffle_window=scale.window,
        workers=1,
    )
    data = PretrainData(config, inputs, scale.batch, SEED, text)
    data.sampler.samples_of_rank(0, rank, scale.ranks)
    seconds, memory = [], 0
    for consumed in (0, scale.random_start()):
        start = time.perf_counter()
        batches = data.batches(consumed, rank, scale.ranks)
        batch, _ = next(batches)
        seconds.append(time.perf_counter() - start)
        if not batch.valid.all():
            raise AssertionError(f"a sample of the corpus is bad: {batch.skipped[0]}")
        memory = max(memory, _resident_bytes() - before)
        batches.close()
    first, resume = seconds
    return Start(index_seconds, first, resume, memory)


def _resident_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Rss"))


def mixing(scale: Scale, lookups: int = 1000) -> Mixing:
    """Compute statistics of the first epoch's order from `lookups` random (batch, rank) pairs."""
    sampler, rng = scale.sampler(), np.random.default_rng(SEED)
    batches = sampler.batches_in_epoch(0, scale.batch)
    per_rank = scale.batch // scale.ranks
    per_stream = scale.batch // scale.streams
    distances = []
    for _ in range(lookups):
        batch, rank = int(rng.integers(batches - 1)), int(rng.integers(scale.ranks))
        rows = sampler.rows(0, batch * per_stream, scale.batch, rank, scale.ranks)
        for number, row in enumerate(rows):
            assert row is not None  # no batch but the last has empty rows
            epoch_position = batch * scale.batch + rank * per_rank + number
            corpus_position = row.shard * scale.shard_samples + row.position
            distances.append(abs(epoch_position - corpus_position) / scale.samples)
    global_batch = sampler.rows(0, int(rng.integers(batches - 1)) * per_stream, scale.batch)
    counts = Counter(row.shard for row in global_batch if row is not None)
    pairs = sum(count * (count - 1) for count in counts.values())
    size, samples, shards = scale.batch, scale.samples, scale.shards
    return Mixing(
        (float(np.mean(distances)), 1 / 3),
        (pairs / (size * (size - 1)), (scale.shard_samples - 1) / (samples - 1)),
        (float(len(counts)), shards * (1 - (1 - 1 / shards) ** size)),
    )


def shards_of_node(scale: Scale) -> int:
    """Return the number of shards that a node reads in an epoch, the mean of eight nodes."""
    sampler, nodes = scale.sampler(), scale.ranks // scale.ranks_per_node

    def count_shards(node: int) -> int:
        units = range(sampler.units_in_epoch(0))
        unit_shards = (sampler.shards_of_unit(0, unit, node, nodes) for unit in units)
        return len({shard for shards in unit_shards for shard in shards})

    some_nodes = np.random.default_rng(SEED).permutation(nodes)[:8]
    return round(np.mean([count_shards(int(node)) for node in some_nodes]))


class CollectiveTrace(TorchDispatchMode):
    """Context that counts collective calls and their bytes, by kind."""

    KINDS: ClassVar = {
        "allreduce_": "all_reduce",
        "all_reduce": "all_reduce",
        "_allgather_base_": "all_gather",
        "all_gather_into_tensor": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "reduce_scatter_tensor": "reduce_scatter",
    }

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation and count it if it is a collective call."""
        out = func(*args, **(kwargs or {}))
        kind = self.KINDS.get(func.overloadpacket.__name__)
        if kind and func.namespace in ("c10d", "_c10d_functional"):
            tensors = [x for x in tree_leaves((args, out)) if isinstance(x, Tensor)]
            self.calls[kind] += 1
            # The whole tensor: the result of an all-gather, the input of a reduce-scatter.
            self.bytes[kind] += max(x.nbytes for x in tensors)
        return out


@contextmanager
def fake_process_group(ranks: int) -> Iterator[None]:
    """Join a fake process group of PyTorch as rank 0."""
    import torch.distributed._tools.fake_collectives  # noqa: F401 (of fake tensors)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def task_collectives(config: PretrainConfig, ranks: int) -> CollectiveTrace:
    """Trace the collective calls of a forward and backward pass, but not of the engine."""
    # A fixed threshold: the running threshold (one all-reduce) needs values, which fake tensors do
    # not have.
    cross = config.model.cross
    anchor = {**cross.options.get("anchor", {}), "threshold": 0.05}
    cross = cross.model_copy(update={"options": {**cross.options, "anchor": anchor}})
    model = config.model.model_copy(update={"cross": cross})
    task = meta_task(config.model_copy(update={"model": model}))
    checkpoint_activations(task, config.training.activation_checkpointing)
    batch = random_batch(config.inputs, config.training.batch // ranks, words=15)
    fake, trace = FakeTensorMode(allow_non_fake_inputs=True), CollectiveTrace()
    with fake_process_group(ranks), fake, gpu_form():
        for network in task.networks():
            network.to_empty(device="cpu")
        if task.teacher:
            # The average is not part of a step.
            task.teacher.average.to("cpu")
        fields: dict[str, Any] = {
            name: fake.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in batch._asdict().items()
        }
        with trace:
            task(batch._replace(**fields), 1).loss.backward()
    return trace


def scale(
    shards: int = 100_000,
    shard_samples: int = 10_000,
    ranks: int = 1024,
    ranks_per_node: int = 8,
    streams: int = 8192,
    batch: int = 32_768,
    window: int = 4096,
    folder: Path | None = None,
) -> None:
    """Simulate one rank of 1,024 over 10⁹ samples: index, first batch, resume, mixing, shards.

    The corpus is generated in --folder, or in temporary files.
    """
    size = Scale(shards, shard_samples, ranks, ranks_per_node, streams, batch, window)
    statistics = mixing(size)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        make_corpus(Path(scratch), size, ranks // 2)
        # A separate process, to measure the memory of one rank.
        executor = Executor(1, spawn=True)
        [start] = executor.map(partial(start_rank, Path(scratch), size), [ranks // 2])
    figures = [
        Figure("scale/index_open", start.open_index, "s"),
        Figure("scale/first_batch", start.first, "s"),
        Figure("scale/resume", start.resume, "s"),
        Figure("scale/order_memory", start.memory / 1e6, "MB"),
        *(
            Figure(f"scale/{name}{suffix}", value, "")
            for name, pair in statistics._asdict().items()
            for suffix, value in zip(("", "_of_uniform_shuffle"), pair)
        ),
        Figure("scale/node_shards", shards_of_node(size), "shards an epoch"),
    ]
    rows = [[figure.name, f"{figure.value:,.6g} {figure.unit}".strip()] for figure in figures]
    print(harness.table([f"{size.samples:,} samples, {ranks:,} ranks", ""], rows), end="\n\n")
    harness.print_figures(figures, torch.device("cpu"))


def collectives(
    config: harness.Config, ranks: int = 1024, overrides: harness.Overrides = None
) -> None:
    """Trace the collective calls of a task's step in a fake process group."""
    settings = harness.load_pretraining(config, overrides)
    settings.require_world_size(ranks)
    trace = task_collectives(settings, ranks)
    rows = [[kind, str(n), f"{trace.bytes[kind] / 1e6:,.3f}"] for kind, n in trace.calls.items()]
    print(harness.table([f"a step on {ranks:,} ranks", "calls", "MB"], rows), end="\n\n")
    figures = [Figure(f"collectives/{kind}", n / 1e6, "MB") for kind, n in trace.bytes.items()]
    harness.print_figures(figures, torch.device("cpu"))


COMMANDS = (scale, collectives)
