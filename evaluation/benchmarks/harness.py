"""Shared parts of all benchmarks: options, turns, timing, peak memory, tables, JSON lines.

A benchmark is a module with `add_options`, which declares its options, `run`, which measures,
prints a table and gives its figures, and `main`, which is `partial(run_benchmark, ...)` of both.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from evaluation.results import aligned
from vlp.config import ConfigError, load_config
from vlp.training.config import PretrainConfig

T = TypeVar("T")


class Measurement(NamedTuple):
    """One measured number.

    `target` is what the project must reach and `stretch` what it would be proud of, both in `unit`
    and None where nothing was promised.
    """

    name: str
    value: float
    unit: str
    target: float | None = None
    stretch: float | None = None


def run_benchmark(
    description: str | None,
    add_options: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace, torch.device], Iterable[Measurement]],
    arguments: Sequence[str] | None = None,
    cpu_only: bool = False,
) -> int:
    """Parse the command line, measure, and print one JSON line per figure; return the exit code.

    Args:
        description: docstring of the benchmark, its `--help`.
        add_options: declares its options; `--device` is there already, unless `cpu_only`.
        run: measures on a device, prints a table and gives the figures.
        arguments: of the command line; None means this process's own.
        cpu_only: the benchmark always computes on the CPU.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if not cpu_only:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        parser.add_argument("--device", default=default)
    add_options(parser)
    options = parser.parse_intermixed_args(arguments)
    device = torch.device("cpu" if cpu_only else options.device)
    try:
        figures = list(run(options, device))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_figures(figures, device)
    return 0


def add_config(parser: argparse.ArgumentParser, required: bool = True, help: str = "") -> None:
    """Declare `--config`, a pretraining, and overrides of its keys."""
    parser.add_argument("--config", required=required, help=help or "of a pretraining")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")


def load_pretraining(options: argparse.Namespace, *overrides: str) -> PretrainConfig:
    """Read the configuration that `add_config` declares, with more overrides after its own."""
    return load_config(options.config, PretrainConfig, [*options.overrides, *overrides])


def device_name(device: torch.device) -> str:
    """Name the device and the CPU threads PyTorch may use: `cpu, 2 threads`."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{kind}, {torch.get_num_threads()} threads"


def print_figures(figures: Iterable[Measurement], device: torch.device) -> None:
    """Print one line of JSON per figure: name, value, unit, target, stretch, device."""
    for figure in figures:
        print(json.dumps(figure._asdict() | {"device": device_name(device)}))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a table as text, its first column to the left and all others to the right."""
    return "\n".join(aligned([head, *rows]))


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Measure the wall time of one call."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def interleave(
    works: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 0
) -> dict[str, list[T]]:
    """Call each of `works` once a round and return what each gave, the warm-up left out.

    The order alternates, so that a slow moment of the machine favours none of them.
    """
    taken: dict[str, list[T]] = {name: [] for name in works}
    for number in range(warm_up + rounds):
        for name in list(works)[:: 1 if number % 2 else -1]:
            taken[name].append(works[name]())
    return {name: each[warm_up:] for name, each in taken.items()}


def activities(device: torch.device) -> list[ProfilerActivity]:
    """List what the profiler records on a device."""
    return [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """Measure the bytes that `work` holds at most beyond what was there before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, size in changes:
        held += size
        peak = max(peak, held)
    return peak
