"""Part C: pretraining, position encodings, re-ranking, and the loader beside the GPU's demand."""

from __future__ import annotations

import gc
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from evaluation.benchmarks import harness, overhead, positions, rerank
from evaluation.benchmarks.gpu.device import product_rate
from evaluation.benchmarks.gpu.figures import CheckedFigure, Setting
from evaluation.benchmarks.gpu.kernels import layer_and_field
from evaluation.benchmarks.gpu.waits import counted_waits, waits_figure
from evaluation.benchmarks.loader.__main__ import TOKENS, Settings, our_batches
from evaluation.benchmarks.loader.shards import make_shards, save_vocabulary
from evaluation.benchmarks.pretrain_step import WARM_UP, Trainee, random_batch
from vlp.config import Precision
from vlp.data.config import AugmentConfig
from vlp.io import write_text
from vlp.layers.attention import Attention
from vlp.positions import PositionContext
from vlp.training.config import Compile
from vlp.training.engines.compile import compile_task

WORDS = 15
WAYS: tuple[Compile, ...] = ("none", "blocks")
# Share of the measured product rate, in percent, of the middle step compiled by `step`.
PROMISED_SHARE = 35.0
ACE_SHARE = 1.0
RERANKING = {"text": 10.0, "albef": 10.0, "ace": 4.0}
# Calls of CUDA's runtime and driver that give the GPU something to do.
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemsetAsync", "cudaMemcpyAsync")


def blocks(setting: Setting) -> Iterator[CheckedFigure]:
    """Time steps of the middle number of pairs, compiled by `blocks` and as they are written."""
    return chain.from_iterable(_pretraining(setting, how, setting.middle) for how in WAYS)


def whole_steps(setting: Setting) -> Iterator[CheckedFigure]:
    """Time steps of the middle number of pairs, compiled by `step`."""
    return _pretraining(setting, "step", setting.middle)


def sizes(setting: Setting) -> Iterator[CheckedFigure]:
    """Time steps of all other numbers of pairs, as they are written: each size is compiled anew."""
    others = [rows for rows in setting.rows if rows != setting.middle]
    return chain.from_iterable(_pretraining(setting, "none", rows) for rows in others)


def compiling_blocks(setting: Setting) -> Iterator[CheckedFigure]:
    """Compile what `blocks` times; the compiler keeps it on disk."""
    yield _compiling(setting, "blocks")


def compiling_without_anchors(setting: Setting) -> Iterator[CheckedFigure]:
    """Compile what `anchors` times beside that."""
    plain = setting._replace(config=overhead.variants(setting.config)[overhead.WITHOUT])
    yield _compiling(plain, "blocks", " without ACE-RPE")


def compiling_steps(setting: Setting) -> Iterator[CheckedFigure]:
    """Compile what `whole_steps` times."""
    yield _compiling(setting, "step")


def _compiling(setting: Setting, how: Compile, of: str = "") -> CheckedFigure:
    batch = random_batch(setting.config.inputs, setting.middle, WORDS).to(setting.device)
    seconds = Trainee(setting.config, setting.device, how, setting.backend).run(batch, 1)
    name = f"pretraining{of}, {setting.middle} pairs, {how}: first step, beside other parts"
    return CheckedFigure(name, seconds, "s")


def _forget() -> None:
    """Drop graphs, else forms of all sizes count towards one limit, and what they held."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _pretraining(setting: Setting, how: Compile, rows: int) -> Iterator[CheckedFigure]:
    """Time steps of so many pairs; write the trace of one, and its kernels by time."""
    device, on_gpu = setting.device, setting.device.type == "cuda"
    rate = product_rate(setting)
    trainee = Trainee(setting.config, device)
    batch = random_batch(setting.config.inputs, rows, WORDS).to(device)
    few = setting.rows[0]  # all that counts grows with the pairs
    with FlopCounterMode(display=False) as counter:
        trainee.step(random_batch(setting.config.inputs, few, WORDS).to(device))
    compile_task(trainee.task, how, device, setting.backend)
    trainee.run(batch, WARM_UP)
    seconds = min(trainee.run(batch, 1 if setting.dry else 10) for _ in range(1 + on_gpu))
    share = 100 * counter.get_total_flops() * rows / few / seconds / rate
    name = f"pretraining, {rows} pairs, {how}"
    promise = PROMISED_SHARE if how == "step" else None
    yield CheckedFigure(name, rows / seconds, "pairs/s")
    yield CheckedFigure(f"{name}: of the product rate", share, "%", promise)
    peak = harness.peak_memory(partial(trainee.run, batch, 1), device)
    if on_gpu:
        peak = torch.cuda.max_memory_allocated(device)
    yield CheckedFigure(f"{name}: peak memory", peak / 2**30, "GiB")
    if on_gpu:  # what counts them on a CPU is no part of a whole graph
        with counted_waits(device) as found:
            trainee.run(batch, 1)
        yield waits_figure(f"{name}: waits for the device", found, 0, device)
    with profile(activities=harness.activities(device)) as profiler:
        trainee.run(batch, 1)
    stem = f"{how}_{rows}"
    profiler.export_chrome_trace(str(setting.out / f"trace_{stem}.json.gz"))
    events = profiler.profiler.kineto_results.events()
    launches = sum(event.name().startswith(LAUNCHES) for event in events)
    most = 3500.0 if how == "step" else None
    yield CheckedFigure(f"{name}: launches", launches, "", at_most=most)
    if on_gpu:
        busy = _write_kernels(setting.out / f"kernels_{stem}.txt", events)
        yield CheckedFigure(f"{name}: kernels and copies, of a step", 100 * busy / seconds, "%")
    del trainee, batch
    _forget()


def _write_kernels(path: Path, events: Iterable[Any]) -> float:
    """Write a profile's kernels, copies and clears by their time; return the seconds of all."""
    spent: dict[str, list[int]] = defaultdict(list)
    for event in events:
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation():
            spent[event.name()].append(event.duration_ns())
    lines = [
        f"{sum(times) / 1e6:9.3f} ms {len(times):5d} {name}\n"
        for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))
    ]
    write_text(path, "".join(lines))
    return sum(map(sum, spent.values())) / 1e9


def anchors(setting: Setting) -> Iterator[CheckedFigure]:
    """Time steps with ACE-RPE and without by turns, as written and compiled."""
    rows, rounds, burst = setting.middle, 12, 4
    if setting.dry:
        rounds = burst = 1
    configs = overhead.variants(setting.config)
    batch = random_batch(setting.config.inputs, rows, WORDS).to(setting.device)
    for how in WAYS:
        trainees = {
            name: Trainee(config, setting.device, how, setting.backend)
            for name, config in configs.items()
        }
        runs = {name: partial(each.run, batch, burst) for name, each in trainees.items()}
        taken = {
            name: np.array(seconds)
            for name, seconds in harness.interleave(runs, rounds, warm_up=1).items()
        }
        name = f"ACE-RPE, {rows} pairs, {'as written' if how == 'none' else how}"
        both = taken[overhead.WITH], taken[overhead.WITHOUT]
        added, (low, high) = overhead.added_share(*both)
        print(f"{name}: {added:+.2%} [{low:+.2%}, {high:+.2%}]")
        yield CheckedFigure(f"{name}: added time of a step", 100 * added, "%", at_most=ACE_SHARE)
        yield CheckedFigure(f"{name}: the same, least of 95 %", 100 * low, "%")
        yield CheckedFigure(f"{name}: the same, most of 95 %", 100 * high, "%")
        del trainees, runs
        _forget()
    peak = {}
    for name, config in configs.items():
        make = partial(Trainee, config, setting.device)
        work = partial(overhead.two_steps, make, batch)
        peak[name] = harness.peak_memory(work, setting.device)
    memory = 100 * (peak[overhead.WITH] / peak[overhead.WITHOUT] - 1)
    yield CheckedFigure("ACE-RPE, as written: added peak memory", memory, "%", at_most=2.0)


def attention(setting: Setting) -> Iterator[CheckedFigure]:
    """Sum the kernels of a cross-attention, forward and backward, with ACE-RPE and without."""
    sizes, rows, calls = ((16, 16), 30, 12, 64, 8), setting.middle, 10
    if setting.dry:
        sizes, calls = ((2, 3), 5, 2, 4, 3), 1
    torch.manual_seed(0)
    anchored, field = layer_and_field(*sizes, rows=rows)
    plain = Attention(anchored.query.in_features, anchored.heads, output=False)
    dtype = torch.float32 if setting.dry else torch.bfloat16
    field = field.each(lambda part: part.to(setting.device, dtype))
    for text_asks in (True, False):
        context = PositionContext(anchors=field, text_queries=text_asks)
        words, patches = (
            torch.randn(rows, tokens, anchored.query.in_features).to(setting.device, dtype)
            for tokens in (field.path.shape[2], field.path.shape[1])
        )
        states, other = (words, patches) if text_asks else (patches, words)
        states.requires_grad_()

        side = "text" if text_asks else "image"
        for kind, layer in (("with ACE-RPE", anchored), ("without", plain)):
            layer.to(setting.device, dtype)
            for _ in range(2):  # the first compiles kernels
                with profile(activities=harness.activities(setting.device)) as profiler:
                    for _ in range(calls):
                        layer(states, other, None, context).square().sum().backward()
                    harness.synchronize(setting.device)
            events = profiler.profiler.kineto_results.events()
            file = setting.out / f"kernels_attention_{side}_{kind.partition(' ')[0]}.txt"
            spent = 1e6 * _write_kernels(file, events) / calls
            name = f"cross-attention, {rows} pairs, {side} asks, {kind}: kernels"
            yield CheckedFigure(name, spent, "us")


def encodings(setting: Setting) -> Iterator[CheckedFigure]:
    """Time each position encoding in DeiT-S, as a share of the plain model's throughput."""
    names = ["plain", "alibi-2d"] if setting.dry else list(positions.VARIANTS)
    # So many images that the GPU, not what launches its kernels, is what takes the time.
    size, rows, rounds = (32, 1, 1) if setting.dry else (224, 256, 5)
    found = positions.measure(names, size, rows, rounds, setting.device)
    print(positions.table(found, rows))
    for name in list(found)[1:]:
        share = 100 * positions.ratio(found, name, "training")
        target = positions.VARIANTS[name].target
        yield CheckedFigure(f"{name}: training, of plain DeiT-S", share, "%", target)


def reranking(setting: Setting) -> Iterator[CheckedFigure]:
    """Time re-ranking in each layout beside a loop in float32, as ALBEF's is, and in ours.

    Scores are held together in float32: random weights give scores that differ by no more than
    bf16 rounds them.
    """
    sizes = rerank.Sizes(6, 12, 4, 1, 4) if setting.dry else rerank.Sizes(rounds=3)
    pairs: tuple[tuple[Precision, Precision], ...] = (
        ("float32", "float32"), ("bf16", "float32"), ("bf16", "bf16"),
    )  # fmt: skip
    for layout, promise in RERANKING.items():
        model = setting.config.model
        cross = model.cross.model_copy(update={"layout": layout})
        model = model.model_copy(update={"cross": cross})
        for ours, loop in pairs[: 1 if setting.dry else None]:
            found = rerank.measure(model, sizes, setting.device, ours, loop)
            print(rerank.table(layout, found))
            name = f"re-ranking, layout {layout}, {ours}, loop in {loop}"
            faster = promise if (ours, loop) == ("bf16", "float32") else None
            yield CheckedFigure(name, found.speedup(), "x", faster)
            yield CheckedFigure(f"{name}: a pair", 1e3 * found.pair[rerank.OURS], "us")
            if ours == loop == "float32":
                name = f"{name}: scores differ by, of their deviation"
                yield CheckedFigure(name, found.difference, "", None, 1e-2, correctness=True)


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
