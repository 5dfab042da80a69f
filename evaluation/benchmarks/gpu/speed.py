"""Part C: pretraining, position encodings, re-ranking, and the loader beside the GPU's demand."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from evaluation.benchmarks import harness, overhead, positions, rerank
from evaluation.benchmarks.gpu.device import product_rate
from evaluation.benchmarks.gpu.figures import CheckedFigure, Setting
from evaluation.benchmarks.loader.__main__ import TOKENS, Settings, our_batches
from evaluation.benchmarks.loader.shards import make_shards, save_vocabulary
from evaluation.benchmarks.pretrain_step import WARM_UP, Trainee, median_parts, random_batch
from vlp.config import Precision
from vlp.data.config import AugmentConfig
from vlp.training.engines.compile import compile_task

WORDS = 15
TRACE = "trace.json.gz"
# Share of the measured product rate, in percent, by pairs of a step.
PROMISED_SHARE = {64: 35.0, 128: 50.0}
ACE_SHARE = 1.0


def pretraining(setting: Setting) -> Iterator[CheckedFigure]:
    """Time compiled steps of some pairs; write a trace of one."""
    rate = product_rate(setting)
    for rows in setting.rows:
        gc.collect()
        trainee = Trainee(setting.config, setting.device)
        batch = random_batch(setting.config.inputs, rows, WORDS).to(setting.device)
        with FlopCounterMode(display=False) as counter:
            trainee.step(batch)
        compile_task(trainee.task, "auto", setting.device)
        steps = [trainee.step(batch) for _ in range(WARM_UP + (1 if setting.dry else 12))]
        seconds = median_parts(steps[WARM_UP:])["step"]
        share = 100 * counter.get_total_flops() / seconds / rate
        name = f"pretraining, {rows} pairs"
        yield CheckedFigure(name, rows / seconds, "pairs/s")
        yield CheckedFigure(f"{name}: of the product rate", share, "%", PROMISED_SHARE.get(rows))
        peak = harness.peak_memory(partial(trainee.step, batch), setting.device)
        if setting.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(setting.device)
        most = 13.0 if rows == 32 else None
        yield CheckedFigure(f"{name}: peak memory", peak / 2**30, "GiB", at_most=most)
    with profile(activities=harness.activities(setting.device)) as profiler:
        trainee.step(batch)
    profiler.export_chrome_trace(str(setting.out / TRACE))


def anchors(setting: Setting) -> Iterator[CheckedFigure]:
    """Time steps with ACE-RPE and without, which take turns."""
    steps = 2 if setting.dry else 12
    found = overhead.measure(setting.config, setting.rows[0], steps, WORDS, setting.device, 1)
    print(overhead.table(found))
    yield CheckedFigure("ACE-RPE: added time of a step", 100 * found.time, "%", at_most=ACE_SHARE)
    yield CheckedFigure("ACE-RPE: added peak memory", 100 * found.memory, "%", at_most=2.0)


def encodings(setting: Setting) -> Iterator[CheckedFigure]:
    """Time each position encoding in DeiT-S, as a share of the plain model's throughput."""
    names = ["plain", "alibi-2d"] if setting.dry else list(positions.VARIANTS)
    size, rows, rounds = (32, 1, 1) if setting.dry else (224, 64, 5)
    found = positions.measure(names, size, rows, rounds, setting.device)
    print(positions.table(found, rows))
    for name in list(found)[1:]:
        share = 100 * positions.ratio(found, name, "training")
        target = positions.VARIANTS[name].target
        yield CheckedFigure(f"{name}: training, of plain DeiT-S", share, "%", target)


def reranking(setting: Setting) -> Iterator[CheckedFigure]:
    """Time re-ranking beside a loop over queries, and compare their ranks."""
    sizes = rerank.Sizes(6, 12, 4, 1, 4) if setting.dry else rerank.Sizes(rounds=4)
    precision: Precision = "float32" if setting.dry else "bf16"
    found = rerank.measure(setting.config.model, sizes, setting.device, precision)
    layout = setting.config.model.cross.layout
    print(rerank.table(layout, found))
    promise = 4.0 if layout == "ace" else 10.0
    yield CheckedFigure(f"re-ranking, layout {layout}", found.speedup(), "x", promise)
    yield CheckedFigure("re-ranking: equal ranks", 100 * found.same_ranks, "%", 99.0)


def loading(setting: Setting) -> Iterator[CheckedFigure]:
    """Time the loader by one worker process; the cores that a GPU needs follow from it."""
    samples, batch, batches = (128, 8, 2) if setting.dry else (1024, 64, 24)
    with tempfile.TemporaryDirectory() as scratch:
        shards, vocabulary = Path(scratch) / "shards", Path(scratch) / "vocabulary"
        shards.mkdir()
        make_shards(shards, samples, images=8)
        save_vocabulary(shards, vocabulary, TOKENS)
        size = 32 if setting.dry else setting.config.model.image.image_size
        settings = Settings(shards, vocabulary, size, batch, workers=1)
        stream = our_batches(settings, AugmentConfig(), normalised=False)
        next(stream)  # the worker's start
        seconds = harness.seconds(lambda: list(islice(stream, batches)), setting.device)
    yield CheckedFigure(LOADED, batch * batches / seconds, "pairs/s")


LOADED = "loader, one worker"
