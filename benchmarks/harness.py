"""Shared parts of all benchmarks: options, turns, timing, peak memory, tables, JSON lines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile
from typer import Argument, Option

from evaluation.results import align
from vlp.config import load_config
from vlp.training.config import PretrainConfig

T = TypeVar("T")

Config = Annotated[Path, Option(metavar="FILE", help="a pretraining of configs/pretrain")]
Overrides = Annotated[
    list[str] | None, Argument(metavar="KEY.SUB=VALUE", help="changes to the configuration")
]
Device = Annotated[str | None, Option(help="default: the GPU, if there is one")]


class Figure(NamedTuple):
    """One measured number."""

    name: str
    value: float
    unit: str


def select_device(name: str | None) -> torch.device:
    """Return the device of `--device`."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def load_pretraining(
    path: Path, overrides: Sequence[str] | None, *more: str, public: bool = True
) -> PretrainConfig:
    """Read a pretraining with more overrides; public=False: without public weights."""
    weights = () if public else ("model.text.weights=null", "model.image.weights=null")
    return load_config(path, PretrainConfig, [*(overrides or ()), *more, *weights])


def device_name(device: torch.device) -> str:
    """Return the name of the device and PyTorch's CPU threads: `cpu, 2 threads`."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{kind}, {torch.get_num_threads()} threads"


def print_figures(figures: Iterable[Figure], device: torch.device) -> None:
    """Print one line of JSON per figure: name, value, unit, device."""
    for figure in figures:
        print(json.dumps(figure._asdict() | {"device": device_name(device)}))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table as text, the first column left-aligned, the others right-aligned."""
    return "\n".join(align([head, *rows]))


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Measure the wall time of one call."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def interleave(
    works: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 0
) -> dict[str, list[T]]:
    """Call all `works` once per round; return the results by name, without warm-up rounds."""
    # The order alternates, so that a slow moment of the machine affects all works.
    results: dict[str, list[T]] = {name: [] for name in works}
    for number in range(warm_up + rounds):
        for name in list(works)[:: 1 if number % 2 else -1]:
            results[name].append(works[name]())
    return {name: values[warm_up:] for name, values in results.items()}


def activities(device: torch.device) -> list[ProfilerActivity]:
    """Return the profiler's activities on a device."""
    return [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """Measure the peak memory of `work` in bytes, beyond the memory in use before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    # The profiler reports allocations (and releases, negative): the peak is the largest sum so far.
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate((size for _, size in changes), initial=0))
