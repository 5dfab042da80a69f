"""Where one pretraining step spends its time, on random pairs and one process.

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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from evaluation.benchmarks.figures import Measurement, print_figures
from vlp.config import ConfigError, load_config
from vlp.data.stream.batch import Batch
from vlp.data.stream.input_spec import Inputs
from vlp.memory import keep_freed_memory
from vlp.tasks.pretraining import Pretraining
from vlp.training.config import PretrainConfig
from vlp.training.optimiser import build_adamw

_CLS = 2


def random_batch(inputs: Inputs, rows: int, words: int, seed: int = 0) -> Batch:
    """Pairs of noise with `words` words each, masked as the configuration masks."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    words = min(words, inputs.max_tokens - 2)
    places = torch.arange(inputs.max_tokens).expand(rows, -1)
    attention, real = places < words + 2, (places > 0) & (places <= words)
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


def measure(
    config: PretrainConfig, rows: int, steps: int, words: int, device: torch.device
) -> dict[str, float]:
    """Median seconds of each part of a step; backward and optimiser as a whole."""
    training = config.training
    torch.manual_seed(training.seed)
    task = Pretraining(
        config.model, config.objectives, "", training.precision, log_every=steps + 10
    ).to(device)
    optimiser = build_adamw(task, training.optimiser)
    batch = random_batch(config.inputs, rows, words).to(device)
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, part: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = part()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds[name].append(time.perf_counter() - started)
        return result

    kinds = [ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    for step in range(1, steps + 3):
        with profile(activities=kinds) as profiler:
            output = timed("forward", partial(task, batch, step))
            timed("backward", output.loss.backward)
            timed("optimiser", optimiser.step)
        optimiser.zero_grad()
        task.after_step(lambda: dict(task.named_parameters()))
        for event in profiler.key_averages():
            if event.key.startswith("pass/"):
                total = max(event.cpu_time_total, getattr(event, "device_time_total", 0.0))
                seconds[event.key].append(total / 1e6)
    return {name: statistics.median(values[2:]) for name, values in seconds.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--rows", type=int, help="pairs; default: the configuration's batch")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--words", type=int, default=15)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    chosen = parser.parse_intermixed_args(arguments)
    try:
        config = load_config(chosen.config, PretrainConfig, chosen.overrides)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        keep_freed_memory()
    rows = chosen.rows or config.training.batch
    parts = measure(config, rows, chosen.steps, chosen.words, device)
    step = parts["forward"] + parts["backward"] + parts["optimiser"]
    print(f"{'part':<24}{'ms':>10}{'share':>9}")
    for name, value in parts.items():
        print(f"{name:<24}{1000 * value:>10.1f}{value / step:>8.1%}")
    print(f"{'step':<24}{1000 * step:>10.1f}   {rows / step:.1f} pairs/s")
    peak = (
        torch.cuda.max_memory_allocated()
        if device.type == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    print_figures(
        [
            Measurement("pretrain_step/pairs", rows / step, "pairs/s"),
            Measurement("pretrain_step/peak_memory", peak / 2**20, "MiB"),
        ],
        device,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
