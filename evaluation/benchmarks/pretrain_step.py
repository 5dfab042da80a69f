"""Time of the parts of one pretraining step, on random pairs and one process.

    python -m evaluation.benchmarks.pretrain_step --config configs/pretrain/scenes_tiny.yaml

Prints a table of parts (medians over steps) and, last, one JSON line per figure.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import profile

from evaluation.benchmarks import harness
from evaluation.benchmarks.harness import Measurement
from vlp.data.stream.batch import Batch
from vlp.data.stream.input_spec import Inputs
from vlp.tasks.pretraining import Pretraining
from vlp.training.config import Compile, PretrainConfig
from vlp.training.engines.compile import Backend, compile_task
from vlp.training.engines.environment import keep_freed_memory
from vlp.training.optimiser import build_adamw

RANGES = ("pass/", "anchor/")
WARM_UP = 3
_CLS = 2


def random_batch(inputs: Inputs, rows: int, words: int | Sequence[int], seed: int = 0) -> Batch:
    """Make pairs of noise with `words` words each, or row by row, masked as the inputs say."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    of_row = torch.tensor(words).clamp(max=inputs.max_tokens - 2).expand(rows)[:, None]
    columns = torch.arange(inputs.max_tokens).expand(rows, -1)
    attention, real = columns < of_row + 2, (columns > 0) & (columns <= of_row)
    ids = (5 + random(rows, inputs.max_tokens) * (inputs.vocab_size - 5)).long()
    ids = torch.where(attention, ids, 0)
    ids[:, 0] = _CLS
    chosen = real & (random(rows, inputs.max_tokens) < (inputs.word_masking or 0.0))
    ratio = inputs.patch_masking.ratio if inputs.patch_masking else 0.0
    return Batch(
        pixels=random(rows, 3, inputs.image_size, inputs.image_size) * 2 - 1,
        text_ids=ids,
        attention_mask=attention,
        word_mask=real,
        mlm_ids=ids,
        mlm_labels=torch.where(chosen, ids, -100),
        mim_mask=random(rows, *inputs.grid) < ratio,
        image_ids=torch.arange(rows),
        uniform=random(rows, 2).double(),
        valid=torch.ones(rows, dtype=torch.bool),
        sample_ids=torch.arange(rows),
    )


class Trainee:
    """One pretraining task with its optimiser, as it is written or compiled."""

    def __init__(
        self,
        config: PretrainConfig,
        device: torch.device,
        how: Compile = "none",
        backend: Backend = "inductor",
    ) -> None:
        training = config.training
        torch.manual_seed(training.seed)
        # Log lines, and the statistics for them, are due at step 0 and every `log_every` steps.
        self.task = Pretraining(
            config.model, config.objectives, "", training.precision, log_every=1_000_000
        ).to(device)
        compile_task(self.task, how, device, backend)
        self.optimiser = build_adamw(self.task, training.optimiser)
        self.clip = training.optimiser.clip
        self.device, self.steps = device, 0

    def step(self, batch: Batch) -> dict[str, float]:
        """Train on `batch` once; return the seconds of forward, backward, optimiser and step."""
        self.steps += 1
        seconds: dict[str, float] = {}

        def timed(name: str, part: Callable[[], Any]) -> Any:
            started = time.perf_counter()
            result = part()
            harness.synchronize(self.device)
            seconds[name] = time.perf_counter() - started
            return result

        output = timed("forward", lambda: self.task(batch, self.steps))
        timed("backward", output.loss.backward)
        timed("optimiser", self._update)
        seconds["step"] = sum(seconds.values())
        return seconds

    def run(self, batch: Batch, steps: int) -> float:
        """Train on `batch` so often, and wait for the device at the end; return seconds a step."""

        def work() -> None:
            for _ in range(steps):
                self.steps += 1
                self.task(batch, self.steps).loss.backward()
                self._update()

        return harness.seconds(work, self.device) / steps

    def _update(self) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.task.parameters(), self.clip)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.task.after_step(lambda: dict(self.task.named_parameters()))


def median_parts(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the median seconds of each part over timed steps."""
    return {part: statistics.median(step[part] for step in steps) for part in steps[0]}


def pass_times(trainee: Trainee, batch: Batch, steps: int) -> dict[str, float]:
    """Measure each named range of the forward pass: median seconds over profiled steps."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(steps):
        with profile(activities=harness.activities(trainee.device)) as profiler:
            trainee.step(batch)
        ranges: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for event in profiler.profiler.kineto_results.events():
            if event.name().startswith(RANGES):
                ranges[event.name()][str(event.device_type())] += event.duration_ns()
        for name, spans in ranges.items():  # on a GPU, the CPU's span and the GPU's
            seconds[name].append(max(spans.values()) / 1e9)
    return {name: statistics.median(values) for name, values in seconds.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the configuration, and how much of it is timed."""
    parser.add_argument("--rows", type=int, help="pairs; default: the configuration's batch")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--words", type=int, default=15)
    harness.add_config(parser)


def run(options: argparse.Namespace, device: torch.device) -> Iterator[Measurement]:
    """Print the table of parts, yield throughput and peak memory."""
    config = harness.load_pretraining(options)
    if device.type == "cpu":
        keep_freed_memory()
    rows = options.rows or config.training.batch
    batch = random_batch(config.inputs, rows, options.words).to(device)
    trainee = Trainee(config, device)
    steps = [trainee.step(batch) for _ in range(WARM_UP + options.steps)][WARM_UP:]
    parts = median_parts(steps) | pass_times(trainee, batch, options.steps)
    step = parts["step"]
    lines = [[name, f"{1000 * t:.1f}", f"{t / step:.1%}"] for name, t in parts.items()]
    print(harness.table(["part", "ms", "share"], lines))
    print(f"{rows / step:.1f} pairs/s", end="\n\n")
    peak = (
        torch.cuda.max_memory_allocated(device)
        if device.type == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    yield Measurement("pretrain_step/pairs", rows / step, "pairs/s")
    yield Measurement("pretrain_step/peak_memory", peak / 2**20, "MiB")


main = partial(harness.run_benchmark, __doc__, add_options, run)


if __name__ == "__main__":
    sys.exit(main())
