"""Time and peak memory of the anchor path (Eq. 7): brute force, fast PyTorch, Triton.

    python -m evaluation.benchmarks.anchor_path --sizes 14x14x30x8x4 24x24x64x8x4

A size is rows x columns x tokens x groups x batch. `brute` stacks all 45 shifted copies and takes
their minimum, as Eq. 7 stands; `torch` is `anchor_path` without a kernel; `triton` (on a GPU) is
the kernel. A second table has unbounded windows (batch 1, forward), where `offsets` takes a
running minimum over every offset of the grid and then of the text, in the memory of one copy.

Times are medians of interleaved repeats. Memory is the peak above the input: on a GPU what
PyTorch's allocator counts, on a CPU the sum of its allocations and releases as the profiler
records them. All agree on the path before anything is timed. Prints the tables and, last, one JSON
line per figure.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from evaluation.benchmarks import harness
from evaluation.benchmarks.harness import Measurement
from vlp.positions.anchor import Metric, anchor_distance, anchor_path

_CPU_SIZES = ("14x14x30x8x4", "24x24x30x8x4", "24x24x64x8x4")
_GPU_SIZES = ("14x14x30x8x64", "24x24x30x8x64", "24x24x64x8x64")
_TEXT, _PATCH = 2, 1  # windows of 5 tokens and 3 x 3 patches

Path = Callable[[Tensor], Tensor]


class Size(NamedTuple):
    """A measured size: a grid of patches, tokens, groups and pairs."""

    rows: int
    columns: int
    tokens: int
    groups: int
    batch: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


class Timing(NamedTuple):
    """Median seconds and peak bytes of each path at one size; step: the pass, or the metric."""

    size: Size
    step: str
    results: dict[str, tuple[float, int]]

    def rows(self) -> Iterator[list[str]]:
        """Yield a table row per path."""
        slowest = next(iter(self.results.values()))[0]
        for name, (time, memory) in self.results.items():
            speed = f"{slowest / time:.1f}x"
            yield [str(self.size), self.step, name, f"{1000 * time:.2f}", _mib(memory), speed]

    def figures(self) -> Iterator[Measurement]:
        """Yield time and memory of each path."""
        for name, (time, memory) in self.results.items():
            prefix = f"anchor_path/{self.size}/{self.step}/{name}"
            yield Measurement(f"{prefix}/time", 1000 * time, "ms")
            yield Measurement(f"{prefix}/peak_memory", memory / 2**20, "MiB")


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


def parse_size(text: str) -> Size:
    """Read `rows x columns x tokens x groups x batch`, five positive integers joined by x."""
    try:
        size = Size(*map(int, text.split("x")))
    except (TypeError, ValueError):
        size = None
    if size is None or min(size) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not ROWSxCOLUMNSxTOKENSxGROUPSxBATCH, as in 24x24x64x8x4"
        )
    return size


def random_distance(size: Size, device: torch.device, seed: int = 0) -> Tensor:
    """D_G (batch, M, N, groups) of noise of which a tenth are anchors, as after training."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size.batch, size.groups, size.rows * size.columns, size.tokens)
    similarity = torch.rand(shape, generator=generator) * 2 - 1
    return anchor_distance(similarity.to(device).movedim(1, -1), 0.8)


def brute_path(distance: Tensor, grid: tuple[int, int]) -> Tensor:
    """Compute Eq. 7 of distances (B, M, N, G) as the minimum over all 45 shifted copies."""
    plane = distance.movedim(-1, 1).unflatten(2, grid)
    reach = (_PATCH, _PATCH, _TEXT)
    every = torch.stack(list(_shifted(plane, reach, "euclidean")))
    return _masked(every.amin(0))


def offsets_path(distance: Tensor, grid: tuple[int, int], metric: Metric) -> Tensor:
    """Take the minimum of distances (B, M, N, G) over all offsets of the grid, then of the text."""
    plane = distance.movedim(-1, 1).unflatten(2, grid)
    reaches = ((grid[0] - 1, grid[1] - 1, 0), (0, 0, plane.shape[-1] - 1))
    for reach in reaches:
        nearest = plane
        for shifted in _shifted(plane, reach, metric):
            nearest = torch.minimum(nearest, shifted)
        plane = nearest
    return _masked(plane)


def _shifted(plane: Tensor, reach: tuple[int, int, int], metric: Metric) -> Iterator[Tensor]:
    """Every shift of (..., rows, columns, N) within reach, with the length of the way added."""
    padding = [side for axis in (2, 1, 0) for side in (reach[axis], reach[axis])]
    padded = functional.pad(plane, padding, value=math.inf)
    for down in range(-reach[0], reach[0] + 1):
        for right in range(-reach[1], reach[1] + 1):
            if metric == "euclidean":
                length = math.hypot(down, right)
            elif metric == "manhattan":
                length = abs(down) + abs(right)
            else:
                length = max(abs(down), abs(right))
            for along in range(-reach[2], reach[2] + 1):
                window = padded
                for axis, offset in enumerate((down, right, along)):
                    window = window.narrow(axis - 3, reach[axis] + offset, plane.shape[axis - 3])
                yield window + (length + abs(along))


def _masked(nearest: Tensor) -> Tensor:
    path = torch.where(torch.isfinite(nearest), nearest, 0.0)
    return path.flatten(2, 3).movedim(1, -1)


def torch_path(distance: Tensor, grid: tuple[int, int]) -> Tensor:
    """Run `anchor_path` of distances (B, M, N, G) without the kernel, on any device."""
    return anchor_path(distance, grid, kernel=False)[0]


def triton_path(distance: Tensor, grid: tuple[int, int]) -> Tensor:
    """Run the kernel on distances (B, M, N, G) through `anchor_path`, as a model calls it."""
    return anchor_path(distance, grid)[0]


def unbounded_path(distance: Tensor, grid: tuple[int, int], metric: Metric) -> Tensor:
    """Run `anchor_path` of distances (B, M, N, G) with unbounded windows: distance transforms."""
    return anchor_path(distance, grid, None, None, None, metric)[0]


def measure(
    paths: dict[str, Path], distance: Tensor, backward: bool, repeats: int
) -> dict[str, tuple[float, int]]:
    """Return median seconds and peak bytes of each path on distances (B, M, N, G), in turns.

    Raises:
        RuntimeError: a path differs from the first one's.
    """
    device = distance.device
    distance = distance.detach().requires_grad_(backward)
    gradient = torch.ones_like(distance)

    def run(path: Path) -> Tensor:
        found = path(distance)
        return torch.autograd.grad(found, distance, gradient)[0] if backward else found

    first = None
    for name, path in paths.items():  # also the warm-up
        found = path(distance).detach()
        first = found if first is None else first
        if not torch.allclose(found, first, rtol=0, atol=1e-3):
            raise RuntimeError(f"{name} finds other paths than {next(iter(paths))}")
        run(path)
    memory = {name: harness.peak_memory(partial(run, path), device) for name, path in paths.items()}
    turns = {
        name: partial(harness.seconds, partial(run, path), device) for name, path in paths.items()
    }
    taken = harness.interleave(turns, repeats)
    return {name: (statistics.median(taken[name]), memory[name]) for name in paths}


def bounded(size: Size, device: torch.device, repeats: int) -> Iterator[Timing]:
    """Measure windows of 5 tokens and 9 patches."""
    grid = size.rows, size.columns
    distance = random_distance(size, device)
    paths: dict[str, Path] = {
        "brute": partial(brute_path, grid=grid),
        "torch": partial(torch_path, grid=grid),
    }
    if device.type == "cuda":
        paths["triton"] = partial(triton_path, grid=grid)
    for step, backward in (("forward", False), ("forward+backward", True)):
        yield Timing(size, step, measure(paths, distance, backward, repeats))


def unbounded(size: Size, device: torch.device, repeats: int) -> Iterator[Timing]:
    """Measure windows None."""
    size = size._replace(batch=1)
    grid = size.rows, size.columns
    distance = random_distance(size, device)
    metrics: tuple[Metric, ...] = ("manhattan", "chebyshev")
    for metric in metrics:
        paths: dict[str, Path] = {
            "offsets": partial(offsets_path, grid=grid, metric=metric),
            "torch": partial(unbounded_path, grid=grid, metric=metric),
        }
        yield Timing(size, metric, measure(paths, distance, False, repeats))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare sizes and repeats."""
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=parse_size,
        metavar="SIZE",
        help=f"default: {' '.join(_CPU_SIZES)}, on a GPU {' '.join(_GPU_SIZES)}",
    )
    parser.add_argument("--repeats", type=int, help="default: 7, on a GPU 20")


def run(options: argparse.Namespace, device: torch.device) -> Iterator[Measurement]:
    """Measure every size, print both tables, yield the figures."""
    on_gpu = device.type == "cuda"
    sizes = options.sizes or [parse_size(text) for text in (_GPU_SIZES if on_gpu else _CPU_SIZES)]
    repeats = options.repeats or (20 if on_gpu else 7)
    for title, ways, times in (
        ("5 tokens, 9 patches", bounded, repeats),
        ("unbounded, forward", unbounded, min(repeats, 3)),
    ):
        found = [timing for size in sizes for timing in ways(size, device, times)]
        rows = [row for timing in found for row in timing.rows()]
        print(
            harness.table([title, "", "path", "ms", "MiB", "speed"], rows), end="\n\n", flush=True
        )
        for timing in found:
            yield from timing.figures()


main = partial(harness.run_benchmark, __doc__, add_options, run)


if __name__ == "__main__":
    sys.exit(main())
