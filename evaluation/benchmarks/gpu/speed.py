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
from evaluation.benchmarks.gpu.waits import counted_waits, waits_figure
from evaluation.benchmarks.loader.__main__ import TOKENS, Settings, our_batches
from evaluation.benchmarks.loader.shards import make_shards, save_vocabulary
from evaluation.benchmarks.pretrain_step import WARM_UP, Trainee, random_batch
from vlp.data.config import AugmentConfig
from vlp.training.config import Compile
from vlp.training.engines.compile import compile_task

WORDS = 15
# Share of the measured product rate, in percent, by pairs of a step compiled by `step`.
PROMISED_SHARE = {64: 35.0, 128: 50.0}
ACE_SHARE = 1.0
RERANKING = {"text": 10.0, "albef": 10.0, "ace": 4.0}
# Calls of CUDA's runtime and driver that give the GPU something to do.
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemsetAsync", "cudaMemcpyAsync")


def pretraining(setting: Setting, how: Compile, rows: tuple[int, ...]) -> Iterator[CheckedFigure]:
    """Time compiled steps of so many pairs each; write a trace of one."""
    rate = product_rate(setting)
    for each in rows:
        yield from _pretraining(setting, how, each, rate)
        torch.compiler.reset()  # else forms of all sizes count towards one limit
        gc.collect()


def whole_steps(setting: Setting) -> Iterator[CheckedFigure]:
    """Time steps of all numbers of pairs, compiled by `step`, which carries the promises."""
    middle = len(setting.rows) // 2  # it has the promise, and comes first
    rows = (setting.rows[middle], *setting.rows[:middle], *setting.rows[middle + 1 :])
    return pretraining(setting, "step", rows)


def blocks(setting: Setting) -> Iterator[CheckedFigure]:
    """Time steps of the middle number of pairs, compiled by `blocks`."""
    return pretraining(setting, "blocks", (setting.rows[len(setting.rows) // 2],))


def _pretraining(setting: Setting, how: Compile, rows: int, rate: float) -> Iterator[CheckedFigure]:
    device, on_gpu = setting.device, setting.device.type == "cuda"
    trainee = Trainee(setting.config, device)
    batch = random_batch(setting.config.inputs, rows, WORDS).to(device)
    with FlopCounterMode(display=False) as counter:
        trainee.step(batch)
    compile_task(trainee.task, how, device, setting.backend)
    trainee.run(batch, WARM_UP)
    seconds = trainee.run(batch, 1 if setting.dry else 20)
    share = 100 * counter.get_total_flops() / seconds / rate
    name = f"pretraining, {rows} pairs, {how}"
    promise = PROMISED_SHARE.get(rows) if how == "step" else None
    yield CheckedFigure(name, rows / seconds, "pairs/s")
    yield CheckedFigure(f"{name}: of the product rate", share, "%", promise)
    peak = harness.peak_memory(partial(trainee.run, batch, 1), device)
    if on_gpu:
        peak = torch.cuda.max_memory_allocated(device)
    most = 13.0 if rows == 32 else None
    yield CheckedFigure(f"{name}: peak memory", peak / 2**30, "GiB", at_most=most)
    if on_gpu:  # what counts them on a CPU is no part of a whole graph
        with counted_waits(device) as found:
            trainee.run(batch, 1)
        yield waits_figure(f"{name}: waits for the device", found, 0, device)
    with profile(activities=harness.activities(device)) as profiler:
        trainee.run(batch, 1)
    profiler.export_chrome_trace(str(setting.out / f"trace_{how}.json.gz"))
    launches = sum(
        event.name().startswith(LAUNCHES) for event in profiler.profiler.kineto_results.events()
    )
    most = 3500.0 if how == "step" else None
    yield CheckedFigure(f"{name}: launches", launches, "", at_most=most)


def anchors(setting: Setting) -> Iterator[CheckedFigure]:
    """Time steps with ACE-RPE and without, which take turns, as written and compiled."""
    steps, rows = 2 if setting.dry else 12, setting.rows[0]
    ways: tuple[Compile, ...] = ("none", "blocks")
    for how in ways:
        found = overhead.measure(
            setting.config, rows, steps, WORDS, setting.device, 1, how, setting.backend
        )
        print(overhead.table(found))
        name = f"ACE-RPE, {'as written' if how == 'none' else how}"
        time, memory = 100 * found.time, 100 * found.memory
        yield CheckedFigure(f"{name}: added time of a step", time, "%", at_most=ACE_SHARE)
        yield CheckedFigure(f"{name}: added peak memory", memory, "%", at_most=2.0)
        gc.collect()


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
    """Time re-ranking in each layout beside a loop in float32, as ALBEF's is, and in ours."""
    sizes = rerank.Sizes(6, 12, 4, 1, 4) if setting.dry else rerank.Sizes(rounds=3)
    for layout, promise in RERANKING.items():
        model = setting.config.model
        cross = model.cross.model_copy(update={"layout": layout})
        model = model.model_copy(update={"cross": cross})
        for loop in dict.fromkeys(("float32", setting.precision)):
            found = rerank.measure(model, sizes, setting.device, setting.precision, loop)
            print(rerank.table(layout, found))
            name = f"re-ranking, layout {layout}, loop in {loop}"
            faster = promise if loop == "float32" else None
            equal = 99.0 if loop == setting.precision else None
            yield CheckedFigure(name, found.speedup(), "x", faster)
            yield CheckedFigure(f"{name}: equal ranks", 100 * found.same_ranks, "%", equal)


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
