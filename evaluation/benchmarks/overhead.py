"""Overhead of ACE-RPE in one pretraining step: time and peak memory, with it and without.

    OMP_NUM_THREADS=2 python -m evaluation.benchmarks.overhead --config configs/pretrain/small.yaml

Two tasks in one process, the same but for `model.cross.position`, train on the same random pairs
and take turns step by step, so that whatever else the machine does hits both. A step is forward,
backward, gradient clipping, AdamW and the teacher's update, with every loss of the configuration;
only the statistics of log lines are left out. On a CPU freed memory is kept, as training keeps it:
which blocks the system maps anew is a lottery of sizes that costs more than ACE-RPE does. Public
weights are not loaded and the teacher's queue is short, which makes the shares larger, never
smaller.

Times of whole steps are taken without a profiler; the rows of single passes come from separate
profiled steps. Peak memory is the largest sum of live tensors, weights and optimiser state in it:
on a GPU `torch.cuda.max_memory_allocated`, on a CPU the profiler's tally of allocations, which does
not depend on what else the process holds. Prints a table and, last, one JSON line per figure.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from evaluation.benchmarks import harness
from evaluation.benchmarks.harness import Measurement
from evaluation.benchmarks.pretrain_step import (
    WARM_UP,
    Trainee,
    median_parts,
    pass_times,
    random_batch,
)
from vlp.config import ConfigError
from vlp.data.stream.batch import Batch
from vlp.metrics.bootstrap import percentile_interval
from vlp.training.config import Compile, PretrainConfig
from vlp.training.engines.compile import Backend
from vlp.training.engines.environment import keep_freed_memory

WITH, WITHOUT = "with ACE-RPE", "without"
QUEUE = 1024


class Overhead(NamedTuple):
    """Medians in seconds by variant and part, and what ACE-RPE adds as shares.

    parts: forward, backward, optimiser and step of timed steps; passes: the ranges of profiled
    ones, in which the profiler itself costs time. time, and memory: added share of the step and of
    the peak; interval: 95 % interval of the former. peak: bytes by variant.
    """

    parts: dict[str, dict[str, float]]
    quartiles: dict[str, tuple[float, float]]
    passes: dict[str, dict[str, float]]
    time: float
    interval: tuple[float, float]
    peak: dict[str, int]
    memory: float


def variants(config: PretrainConfig) -> dict[str, PretrainConfig]:
    """The configuration without public weights and with a short queue: with ACE-RPE and without.

    Raises:
        ConfigError: the configuration has no ACE-RPE.
    """
    if "anchor" not in config.model.cross.position:
        raise ConfigError(
            "model.cross.position does not name `anchor`: there is nothing to measure"
        )
    data = config.model_dump()
    data["model"]["text"]["weights"] = data["model"]["image"]["weights"] = None
    teacher = data["objectives"]["teacher"]
    if teacher:
        teacher["queue"] = min(teacher["queue"], QUEUE)
    rest = tuple(name for name in config.model.cross.position if name != "anchor")
    found = {}
    for name, position in ((WITH, config.model.cross.position), (WITHOUT, rest)):
        data["model"]["cross"]["position"] = position
        found[name] = PretrainConfig.model_validate(data)
    return found


def measure(
    config: PretrainConfig,
    rows: int,
    steps: int,
    words: int,
    device: torch.device,
    profiled_steps: int = 3,
    how: Compile = "none",
    backend: Backend = "inductor",
) -> Overhead:
    """Run the benchmark.

    Args:
        config: with ACE-RPE.
        rows: pairs of a batch.
        steps: timed steps of each variant.
        words: real words of every text, fewer where they do not fit.
        device: where.
        profiled_steps: steps of each variant for the rows of passes.
        how: both are compiled.
        backend: of `torch.compile`.
    """
    configs = variants(config)
    batch = random_batch(config.inputs, rows, words).to(device)
    makers = {name: partial(Trainee, c, device, how, backend) for name, c in configs.items()}
    peak = {}
    for name, make in makers.items():
        gc.collect()  # what an earlier task left would be freed, and counted, during this one
        peak[name] = harness.peak_memory(partial(two_steps, make, batch), device)
    trainees = {name: make() for name, make in makers.items()}
    turns = {name: partial(trainee.step, batch) for name, trainee in trainees.items()}
    timed = harness.interleave(turns, steps, WARM_UP)
    medians = {name: median_parts(taken) for name, taken in timed.items()}
    passes: dict[str, dict[str, float]] = defaultdict(dict)
    for name, trainee in trainees.items():
        for part, seconds in pass_times(trainee, batch, profiled_steps).items():
            passes[part][name] = seconds
    whole = {name: np.array([run["step"] for run in runs]) for name, runs in timed.items()}
    added, interval = added_share(whole[WITH], whole[WITHOUT])
    return Overhead(
        parts={part: {name: medians[name][part] for name in medians} for part in medians[WITH]},
        quartiles={
            name: (float(np.quantile(each, 0.25)), float(np.quantile(each, 0.75)))
            for name, each in whole.items()
        },
        passes=dict(passes),
        time=added,
        interval=interval,
        peak=peak,
        memory=peak[WITH] / peak[WITHOUT] - 1,
    )


def added_share(
    with_it: NDArray[np.floating],
    without: NDArray[np.floating],
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, tuple[float, float]]:
    """Compute the added share from steps that took turns, and its 95 % bootstrap interval.

    The median of the ratios of neighbouring steps, less 1: a slow moment hits both of a pair.
    """
    ratios = with_it / without
    drawn = np.random.default_rng(seed).integers(len(ratios), size=(resamples, len(ratios)))
    low, high = percentile_interval(np.median(ratios[drawn], axis=1))
    return float(np.median(ratios)) - 1, (float(low) - 1, float(high) - 1)


def two_steps(make: Callable[[], Trainee], batch: Batch) -> None:
    """Build a task and train it: only the second step has the optimiser's state beside it."""
    trainee = make()
    for _ in range(2):
        trainee.step(batch)


def table(found: Overhead) -> str:
    """Lay out parts and passes in milliseconds, and peak memory in MiB."""
    step = found.parts["step"][WITHOUT]

    def row(name: str, values: dict[str, float]) -> list[str]:
        times = values.get(WITH, 0.0), values.get(WITHOUT, 0.0)
        added = times[0] - times[1]
        return [name, *(f"{1e3 * t:.1f}" for t in (*times, added)), f"{added / step:.1%}"]

    rows = [row(name, values) for name, values in found.parts.items()]
    rows.append(["of the forward pass, profiled:", *[""] * 4])
    rows += [row(f"  {name}", values) for name, values in sorted(found.passes.items())]
    lines = [harness.table(["part, ms", WITH, WITHOUT, "added", "of step"], rows)]
    for name, (low, high) in found.quartiles.items():
        lines.append(f"quartiles of a step, {name}: {1e3 * low:.1f} to {1e3 * high:.1f} ms")
    low, high = found.interval
    lines.append(
        f"step: {found.time:+.2%} (paired ratios, 95 % interval {low:+.2%} to {high:+.2%})"
    )
    sizes = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in found.peak.items())
    lines.append(f"peak memory: {found.memory:+.2%} ({sizes})")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the configuration, and how much of it is timed."""
    parser.add_argument("--rows", type=int, help="pairs; default: 16 on a CPU, 64 on a GPU")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each variant")
    parser.add_argument("--words", type=int, default=15)
    harness.add_config(parser)


def run(options: argparse.Namespace, device: torch.device) -> Iterator[Measurement]:
    """Print the table, yield the added shares."""
    on_gpu = device.type == "cuda"
    if not on_gpu:
        keep_freed_memory()
    rows = options.rows or (64 if on_gpu else 16)
    found = measure(harness.load_pretraining(options), rows, options.steps, options.words, device)
    print(table(found), end="\n\n")
    yield Measurement("overhead/step", 100 * found.time, "%", 4.0 if on_gpu else 5.0, 1.0)
    yield Measurement("overhead/step_low", 100 * found.interval[0], "%")
    yield Measurement("overhead/step_high", 100 * found.interval[1], "%")
    yield Measurement("overhead/peak_memory", 100 * found.memory, "%", 5.0, 2.0)
    yield Measurement("overhead/step_time", 1e3 * found.parts["step"][WITH], "ms")


main = partial(harness.run_benchmark, __doc__, add_options, run)


if __name__ == "__main__":
    sys.exit(main())
