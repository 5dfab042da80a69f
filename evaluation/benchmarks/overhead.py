"""What ACE-RPE adds to one pretraining step: time and peak memory, with it and without.

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
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.profiler import ProfilerActivity, profile

from evaluation.benchmarks.figures import Measurement, print_figures
from evaluation.benchmarks.memory import peak_memory
from evaluation.benchmarks.pretrain_step import random_batch
from vlp.config import ConfigError, load_config
from vlp.data.stream.batch import Batch
from vlp.memory import keep_freed_memory
from vlp.metrics.bootstrap import percentile_interval
from vlp.tasks.pretraining import Pretraining
from vlp.training.config import PretrainConfig
from vlp.training.optimiser import build_adamw

WITH, WITHOUT = "with ACE-RPE", "without"
QUEUE = 1024
WARM_UP = 3
RANGES = ("pass/", "anchor/")


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


class _Trainee:
    """One task with its optimiser, and one step of training."""

    def __init__(self, config: PretrainConfig, device: torch.device) -> None:
        training = config.training
        torch.manual_seed(training.seed)
        # Log lines, and the statistics for them, are due at step 0 and every `log_every` steps.
        self.task = Pretraining(
            config.model, config.objectives, "", training.precision, log_every=1_000_000
        ).to(device)
        self.optimiser = build_adamw(self.task, training.optimiser)
        self.clip = training.optimiser.clip
        self.device, self.steps = device, 0

    def step(self, batch: Batch) -> dict[str, float]:
        """Train on `batch` once; seconds of each part."""
        self.steps += 1
        seconds: dict[str, float] = {}

        def timed(name: str, part: Callable[[], Any]) -> Any:
            started = time.perf_counter()
            result = part()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds[name] = time.perf_counter() - started
            return result

        output = timed("forward", lambda: self.task(batch, self.steps))
        timed("backward", output.loss.backward)
        timed("optimiser", self._update)
        seconds["step"] = sum(seconds.values())
        return seconds

    def _update(self) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.task.parameters(), self.clip)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.task.after_step(lambda: dict(self.task.named_parameters()))


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
) -> Overhead:
    """Run the benchmark.

    Args:
        config: with ACE-RPE.
        rows: pairs of a batch.
        steps: timed steps of each variant.
        words: real words of every text, fewer where they do not fit.
        device: where.
        profiled_steps: steps of each variant for the rows of passes.
    """
    configs = variants(config)
    batch = random_batch(config.inputs, rows, words).to(device)
    peak = {}
    for name, each in configs.items():
        gc.collect()  # what an earlier task left would be freed, and counted, during this one
        peak[name] = peak_memory(partial(_two_steps, each, batch, device), device)
    trainees = {name: _Trainee(each, device) for name, each in configs.items()}
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in trainees}
    for number in range(WARM_UP + steps):
        # Which one goes first alternates: a slow moment of the machine favours neither.
        for name in list(trainees)[:: 1 if number % 2 else -1]:
            taken[name].append(trainees[name].step(batch))
    passes: dict[str, dict[str, float]] = defaultdict(dict)
    for name, trainee in trainees.items():
        for part, seconds in _passes(trainee, batch, profiled_steps).items():
            passes[part][name] = seconds
    timed = {name: runs[WARM_UP:] for name, runs in taken.items()}
    whole = {name: np.array([run["step"] for run in runs]) for name, runs in timed.items()}
    added, interval = added_share(whole[WITH], whole[WITHOUT])
    return Overhead(
        parts={
            part: {name: statistics.median(run[part] for run in timed[name]) for name in timed}
            for part in timed[WITH][0]
        },
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
    """What is added as a share, from steps that took turns, and its 95 % bootstrap interval.

    The median of the ratios of neighbouring steps, less 1: a slow moment hits both of a pair.
    """
    ratios = with_it / without
    drawn = np.random.default_rng(seed).integers(len(ratios), size=(resamples, len(ratios)))
    low, high = percentile_interval(np.median(ratios[drawn], axis=1))
    return float(np.median(ratios)) - 1, (float(low) - 1, float(high) - 1)


def _passes(trainee: _Trainee, batch: Batch, steps: int) -> dict[str, float]:
    """Median seconds of each named range of the forward pass."""
    kinds = [ProfilerActivity.CPU]
    if trainee.device.type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(steps):
        with profile(activities=kinds) as profiler:
            trainee.step(batch)
        ranges: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for event in profiler.profiler.kineto_results.events():
            if event.name().startswith(RANGES):
                ranges[event.name()][str(event.device_type())] += event.duration_ns()
        for name, spans in ranges.items():  # on a GPU, the CPU's span and the GPU's
            seconds[name].append(max(spans.values()) / 1e9)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _two_steps(config: PretrainConfig, batch: Batch, device: torch.device) -> None:
    """Build a task and train it; only the second step has the optimiser's state beside it."""
    trainee = _Trainee(config, device)
    for _ in range(2):
        trainee.step(batch)


def table(found: Overhead) -> str:
    """Rows of parts and passes in milliseconds, and of peak memory in MiB."""
    lines = [f"{'part, ms':<26}{WITH:>14}{WITHOUT:>12}{'added':>10}{'of step':>9}"]
    step = found.parts["step"][WITHOUT]

    def row(name: str, values: dict[str, float]) -> None:
        with_it, without = values.get(WITH, 0.0), values.get(WITHOUT, 0.0)
        added = with_it - without
        lines.append(
            f"{name:<26}{1e3 * with_it:>14.1f}{1e3 * without:>12.1f}{1e3 * added:>10.1f}"
            f"{added / step:>9.1%}"
        )

    for name, values in found.parts.items():
        row(name, values)
    lines.append("of the forward pass, profiled:")
    for name, values in sorted(found.passes.items()):
        row(f"  {name}", values)
    for name, (low, high) in found.quartiles.items():
        lines.append(f"quartiles of a step, {name}: {1e3 * low:.1f} to {1e3 * high:.1f} ms")
    low, high = found.interval
    lines.append(
        f"step: {found.time:+.2%} (paired ratios, 95 % interval {low:+.2%} to {high:+.2%})"
    )
    sizes = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in found.peak.items())
    lines.append(f"peak memory: {found.memory:+.2%} ({sizes})")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--rows", type=int, help="pairs; default: 16 on a CPU, 64 on a GPU")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each variant")
    parser.add_argument("--words", type=int, default=15)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    chosen = parser.parse_intermixed_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        keep_freed_memory()
    rows = chosen.rows or (64 if device.type == "cuda" else 16)
    try:
        config = load_config(chosen.config, PretrainConfig, chosen.overrides)
        found = measure(config, rows, chosen.steps, chosen.words, device)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(found))
    target = 4.0 if device.type == "cuda" else 5.0
    print_figures(
        [
            Measurement("overhead/step", 100 * found.time, "%", target, 1.0),
            Measurement("overhead/step_low", 100 * found.interval[0], "%"),
            Measurement("overhead/step_high", 100 * found.interval[1], "%"),
            Measurement("overhead/peak_memory", 100 * found.memory, "%", 5.0, 2.0),
            Measurement("overhead/step_time", 1e3 * found.parts["step"][WITH], "ms"),
        ],
        device,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
