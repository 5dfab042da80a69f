"""Time of one pretraining step on random pairs: its parts, and the additions of ACE-RPE."""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.profiler import profile

from benchmarks import harness
from benchmarks.harness import Figure
from vlp.config import ConfigError
from vlp.data.stream.batch import Batch, Inputs
from vlp.metrics import percentile_interval
from vlp.tasks.pretraining import Pretraining
from vlp.training.config import Compile, PretrainConfig
from vlp.training.engines.compile import Backend, compile_task
from vlp.training.engines.environment import keep_freed_memory
from vlp.training.optimiser import build_adamw

WARM_UP, PROFILED_STEPS = 3, 3
WITH, WITHOUT = "with ACE-RPE", "without"
# Keys of the teacher's queue in `overhead`; a longer queue makes the shares smaller.
QUEUE = 1024
# Gamma distribution of the tokens of COCO's captions (bert-base-uncased, with [CLS] and [SEP]):
# mean 14.0, standard deviation 3.0, minimum 9, 5 % above 19 (795 captions).
SHORTEST, SHAPE, SCALE = 9, 2.8, 1.8
_CLS = 2


def caption_lengths(rows: int) -> list[int]:
    """Draw caption lengths of COCO's distribution, in tokens without [CLS] and [SEP]."""
    lengths = SHORTEST + np.random.default_rng(0).gamma(SHAPE, SCALE, rows)
    return (lengths.astype(int) - 2).tolist()


def random_batch(inputs: Inputs, rows: int, words: int | Sequence[int], seed: int = 0) -> Batch:
    """Create a batch of random pairs, with tokens and patches masked as in `inputs`.

    words: number of words of all captions, or of each.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    lengths = torch.tensor(words).clamp(max=inputs.max_tokens - 2).expand(rows)[:, None]
    columns = torch.arange(inputs.max_tokens).expand(rows, -1)
    attention_mask, word_mask = columns < lengths + 2, (columns > 0) & (columns <= lengths)
    ids = (5 + random(rows, inputs.max_tokens) * (inputs.vocab_size - 5)).long()
    ids = torch.where(attention_mask, ids, 0)
    ids[:, 0] = _CLS
    is_masked = word_mask & (random(rows, inputs.max_tokens) < (inputs.word_masking or 0.0))
    ratio = inputs.patch_masking.ratio if inputs.patch_masking else 0.0
    return Batch(
        pixels=random(rows, 3, inputs.image_size, inputs.image_size) * 2 - 1,
        text_ids=ids,
        attention_mask=attention_mask,
        word_mask=word_mask,
        mlm_ids=ids,
        mlm_labels=torch.where(is_masked, ids, -100),
        mim_mask=random(rows, *inputs.grid) < ratio,
        image_ids=torch.arange(rows),
        uniform=random(rows, 2).double(),
        valid=torch.ones(rows, dtype=torch.bool),
        sample_ids=torch.arange(rows),
    )


class Trainee:
    """One pretraining task with its optimiser, compiled or not."""

    def __init__(
        self,
        config: PretrainConfig,
        device: torch.device,
        mode: Compile = "none",
        backend: Backend = "inductor",
    ) -> None:
        training = config.training
        torch.manual_seed(training.seed)
        # A large `log_every`: no step computes the statistics of a log line.
        self.task = Pretraining(
            config.model, config.objectives, "", training.precision, log_every=1_000_000
        ).to(device)
        compile_task(self.task, mode, device, backend)
        self.optimiser = build_adamw(self.task, training.optimiser)
        self.clip = training.optimiser.clip
        self.device, self.steps = device, 0

    def step(self, batch: Batch) -> dict[str, float]:
        """Train one step on `batch`; return the seconds of forward, backward, optimiser, step."""
        self.steps += 1
        seconds: dict[str, float] = {}

        def time_part(name: str, part: Callable[[], Any]) -> Any:
            start = time.perf_counter()
            result = part()
            harness.synchronize(self.device)
            seconds[name] = time.perf_counter() - start
            return result

        output = time_part("forward", lambda: self.task(batch, self.steps))
        time_part("backward", output.loss.backward)
        time_part("optimiser", self._update)
        seconds["step"] = sum(seconds.values())
        return seconds

    def run(self, batch: Batch, steps: int) -> float:
        """Train `steps` steps on `batch`; return the seconds of a step."""

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
    """Return the median seconds of each part."""
    return {part: statistics.median(step[part] for step in steps) for part in steps[0]}


def pass_times(trainee: Trainee, batch: Batch, steps: int) -> dict[str, float]:
    """Return the median seconds of each named range of the forward pass over profiled steps."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(steps):
        with profile(activities=harness.activities(trainee.device)) as profiler:
            trainee.step(batch)
        ranges: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for event in profiler.profiler.kineto_results.events():
            if event.name().startswith("pass/"):
                ranges[event.name()][str(event.device_type())] += event.duration_ns()
        # On a GPU, a range has a CPU and a GPU time: take the longer.
        for name, spans in ranges.items():
            seconds[name].append(max(spans.values()) / 1e9)
    return {name: statistics.median(values) for name, values in seconds.items()}


class Overhead(NamedTuple):
    """Times and peak memory with and without ACE-RPE, and the shares that it adds."""

    # Median seconds of forward, backward, optimiser and step, by part and variant.
    parts: dict[str, dict[str, float]]
    # Median seconds of ranges of profiled steps, with the profiler's cost.
    passes: dict[str, dict[str, float]]
    # Added share of the step's time, with its 95 % interval.
    time: float
    interval: tuple[float, float]
    # Peak bytes by variant, and the added share.
    peak: dict[str, int]
    memory: float


def variants(config: PretrainConfig) -> dict[str, PretrainConfig]:
    """Return the configuration with and without ACE-RPE, with random weights and a short queue."""
    if "anchor" not in config.model.cross.position:
        raise ConfigError(
            "model.cross.position does not list `anchor`: there is nothing to measure"
        )
    data = config.model_dump()
    data["model"]["text"]["weights"] = data["model"]["image"]["weights"] = None
    teacher = data["objectives"]["teacher"]
    if teacher:
        teacher["queue"] = min(teacher["queue"], QUEUE)
    others = tuple(name for name in config.model.cross.position if name != "anchor")
    configs = {}
    for name, position in ((WITH, config.model.cross.position), (WITHOUT, others)):
        data["model"]["cross"]["position"] = position
        configs[name] = PretrainConfig.model_validate(data)
    return configs


def measure_overhead(
    config: PretrainConfig,
    rows: int,
    steps: int,
    words: int,
    device: torch.device,
) -> Overhead:
    """Measure time and peak memory of a configuration with and without ACE-RPE.

    words: number of words of each text, reduced to the configuration's maximum.
    """
    configs = variants(config)
    batch = random_batch(config.inputs, rows, words).to(device)
    makers = {name: partial(Trainee, c, device) for name, c in configs.items()}
    peak = {}
    for name, make in makers.items():
        # Garbage of an earlier task would be freed, and counted, during this measurement.
        gc.collect()
        peak[name] = harness.peak_memory(partial(two_steps, make, batch), device)
    trainees = {name: make() for name, make in makers.items()}
    turns = {name: partial(trainee.step, batch) for name, trainee in trainees.items()}
    runs_by_name = harness.interleave(turns, steps, WARM_UP)
    medians = {name: median_parts(part_seconds) for name, part_seconds in runs_by_name.items()}
    passes: dict[str, dict[str, float]] = defaultdict(dict)
    for name, trainee in trainees.items():
        for part, seconds in pass_times(trainee, batch, PROFILED_STEPS).items():
            passes[part][name] = seconds
    with_ace, without_ace = (
        np.array([run["step"] for run in runs_by_name[name]]) for name in (WITH, WITHOUT)
    )
    added, interval = added_share(with_ace, without_ace)
    return Overhead(
        parts={part: {name: medians[name][part] for name in medians} for part in medians[WITH]},
        passes=dict(passes),
        time=added,
        interval=interval,
        peak=peak,
        memory=peak[WITH] / peak[WITHOUT] - 1,
    )


def added_share(
    with_ace: NDArray[np.floating], without_ace: NDArray[np.floating]
) -> tuple[float, tuple[float, float]]:
    """Compute the share of time that ACE-RPE adds, and its 95 % bootstrap interval.

    with_ace, without_ace: (steps,) times, measured by turns.
    """
    # The median of ratios of neighbouring steps, as a slow moment of the machine affects both.
    ratios = with_ace / without_ace
    resampled = np.random.default_rng(0).integers(len(ratios), size=(2000, len(ratios)))
    low, high = percentile_interval(np.median(ratios[resampled], axis=1))
    return float(np.median(ratios)) - 1, (float(low) - 1, float(high) - 1)


def two_steps(make: Callable[[], Trainee], batch: Batch) -> None:
    """Build a task and train it for two steps."""
    trainee = make()
    # In the second step, the optimiser's state is in memory.
    for _ in range(2):
        trainee.step(batch)


def overhead_table(result: Overhead) -> str:
    """Format a table of parts and passes in milliseconds, and peak memory in MiB."""
    step = result.parts["step"][WITHOUT]

    def row(name: str, values: dict[str, float]) -> list[str]:
        times = values.get(WITH, 0.0), values.get(WITHOUT, 0.0)
        added = times[0] - times[1]
        return [name, *(f"{1e3 * t:.1f}" for t in (*times, added)), f"{added / step:.1%}"]

    rows = [row(name, values) for name, values in result.parts.items()]
    rows.append(["of the forward pass, profiled:", *[""] * 4])
    rows += [row(f"  {name}", values) for name, values in sorted(result.passes.items())]
    lines = [harness.table(["part, ms", WITH, WITHOUT, "added", "of step"], rows)]
    low, high = result.interval
    lines.append(
        f"step: {result.time:+.2%} (paired ratios, 95 % interval {low:+.2%} to {high:+.2%})"
    )
    sizes = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in result.peak.items())
    lines.append(f"peak memory: {result.memory:+.2%} ({sizes})")
    return "\n".join(lines)


def overhead(
    config: harness.Config,
    rows: int | None = None,
    steps: int = 15,
    words: int = 15,
    device: harness.Device = None,
    overrides: harness.Overrides = None,
) -> None:
    """Measure time and peak memory of a pretraining step with and without ACE-RPE, by turns.

    --rows is 16 on a CPU and 64 on a GPU by default. Public weights are not loaded and the
    teacher's queue is short, which makes the shares larger. Whole steps are timed without a
    profiler; rows of single passes come from separate profiled steps. Peak memory is the largest
    sum of live tensors, weights and optimiser state included.
    """
    torch_device = harness.select_device(device)
    # As in training; mapping memory again would cost more than ACE-RPE.
    if torch_device.type == "cpu":
        keep_freed_memory()
    rows = rows or (64 if torch_device.type == "cuda" else 16)
    settings = harness.load_pretraining(config, overrides)
    result = measure_overhead(settings, rows, steps, words, torch_device)
    print(overhead_table(result), end="\n\n")
    figures = [
        Figure("overhead/step", 100 * result.time, "%"),
        Figure("overhead/step_low", 100 * result.interval[0], "%"),
        Figure("overhead/step_high", 100 * result.interval[1], "%"),
        Figure("overhead/peak_memory", 100 * result.memory, "%"),
    ]
    harness.print_figures(figures, torch_device)


COMMANDS = (overhead,)
