"""Time and memory of the search for near-duplicates by the number of hashes, and a plan at 10⁹.

    OMP_NUM_THREADS=1 python -m evaluation.benchmarks.data.near_hashes --hashes 1000000 10000000

Random hashes of 64 bits, one in a hundred a copy in which one bit differs. The tasks of a search
are alike, so `--tasks` of them are measured, each size in a process of its own, and the time of all
is worked out. Memory is the peak that one task adds to the hashes, which all tasks share.

The plan scales the largest measured size by the comparisons that a hash costs
(`data_tools.dedup.near_duplicates.least_cost`) to `--planned` hashes on `--cores` cores.

What the process of `dedup` itself needs is measured at `--images` and grows with their number: peak
memory, columns that it maps included, and CPU time without the tasks, of which no more than
`--tasks` sortings are done. One image in a hundred has another's bytes, one differs in one bit.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from data_tools.dedup import duplicate_images, near_duplicates
from data_tools.dedup.image_columns import image_columns
from data_tools.dedup.near_duplicates import (
    Sorting,
    best_k,
    least_cost,
    pairs_of_sorting,
    sortings,
)
from data_tools.dedup.perceptual_hash import DISTANCE, READABLE, RECORD
from data_tools.executor.local import LocalExecutor
from evaluation.benchmarks import harness
from evaluation.benchmarks.harness import Measurement

_SHARD = 10_000


class SearchCost(NamedTuple):
    """Cost of a search: its tasks, CPU seconds of all, bytes that one of them takes."""

    tasks: int
    seconds: float
    bytes: int


def measured(most: int, count: int) -> SearchCost:
    """Do some tasks of a search; wants a process of its own, whose peak memory is theirs."""
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**64, count, dtype=np.uint64)
    copies = rng.integers(0, count, count // 100)
    hashes[copies] = hashes[rng.integers(0, count, len(copies))] ^ (
        np.uint64(1) << rng.integers(0, 64, len(copies), dtype=np.uint64)
    )
    tasks = sortings(DISTANCE, count, best_k(hashes, DISTANCE))
    some = np.linspace(0, len(tasks) - 1, min(most, len(tasks))).astype(int).tolist()
    before, started = _peak(), time.process_time()
    for number in some:
        for _ in pairs_of_sorting(hashes, DISTANCE, tasks[number]):
            pass
    seconds = time.process_time() - started
    return SearchCost(len(tasks), seconds * len(tasks) / len(some), _peak() - before)


class OwnCost(NamedTuple):
    """Cost of the process that distributes the tasks: CPU seconds, and bytes of its peak."""

    seconds: float
    bytes: int


def own_cost(most: int, count: int) -> OwnCost:
    """Do all of `dedup` but reading and naming images; wants a process of its own."""

    def some(*search: Any) -> list[Sorting]:
        tasks = sortings(*search)
        return tasks[:: -(-len(tasks) // most)]

    before, started = _peak(), time.process_time()
    made = [0.0]
    with (
        patch.object(duplicate_images, "sortings", some),
        # A single task would be done by this process.
        patch.object(near_duplicates, "_MOST_AT_ONCE", -(-count // 4)),
        image_columns(_records(count, made)) as images,
    ):
        drops = duplicate_images.duplicate_images(images, DISTANCE, LocalExecutor(2))
        duplicate_images.kept_with_dropped_keys(images, drops.dropped)
        for name in ("bytes", "coarse", "sample"):
            images[name][drops.kept]
    return OwnCost(time.process_time() - started - made[0], _peak() - before)


def _records(count: int, made: list[float]) -> Iterator[NDArray[np.void]]:
    """Yield records of shards, and add up the CPU seconds that these took."""
    rng = np.random.default_rng(0)
    for start in range(0, count, _SHARD):
        started = time.process_time()
        size = min(_SHARD, count - start)
        records = np.frombuffer(rng.bytes(size * RECORD.itemsize), RECORD).copy()
        records["sample"], records["second"], records["state"] = np.arange(size), False, READABLE
        same, near = np.arange(0, size - 1, 100), np.arange(50, size - 1, 100)
        records[same + 1] = records[same]
        for name in ("coarse", "fine"):
            records[name][near + 1] = records[name][near]
        records["coarse"][near + 1] ^= np.uint64(1) << rng.integers(0, 64, len(near), np.uint64)
        made[0] += time.process_time() - started
        yield records


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def planned(count: int, size: int, search: SearchCost) -> SearchCost:
    """Scale what `size` hashes took to another number."""
    cost, k = least_cost(DISTANCE, count)
    cost /= least_cost(DISTANCE, size)[0]
    tasks = len(sortings(DISTANCE, count, k))
    return SearchCost(tasks, search.seconds * cost * count / size, search.bytes)


def table(found: Mapping[int, SearchCost], plan: Mapping[int, SearchCost], cores: int) -> str:
    """All of it, for reading."""
    rows = [
        (
            f"{count:,}{', planned' if count in plan else ''}",
            f"{one.tasks:,}",
            f"{1e6 * one.seconds / count:.1f}",
            f"{one.bytes / 1e9:.2f}",
            f"{one.seconds / cores / 60:.2g}",
        )
        for count, one in (*found.items(), *plan.items())
    ]
    head = ["hashes", "tasks", "µs a hash", "GB a task", f"min, {cores} cores"]
    return harness.table(head, rows)


def own_table(found: Mapping[int, OwnCost], planned: Sequence[int]) -> str:
    """The process itself; a plan grows as from the second largest size to the largest one."""
    sizes = sorted(found)
    last = sizes[-1]
    before = sizes[-2] if len(sizes) > 1 else 0
    less = found.get(before, OwnCost(0.0, 0))
    plan = {}
    for count in planned:
        times = (count - last) / (last - before)
        seconds, held = (most + times * (most - few) for few, most in zip(less, found[last]))
        plan[count] = OwnCost(seconds, round(held))
    rows = [
        (
            f"{count:,}{', planned' if count in plan else ''}",
            f"{1e6 * one.seconds / count:.2f}",
            f"{one.bytes / 1e9:.2f}",
        )
        for count, one in (*found.items(), *plan.items())
    ]
    return harness.table(["images, the process itself", "µs an image", "GB"], rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the sizes, what is planned, and how much is measured."""
    parser.add_argument("--hashes", type=int, nargs="+", default=[10**5, 10**6, 10**7, 10**8])
    parser.add_argument("--planned", type=int, nargs="*", default=[10**9])
    parser.add_argument("--tasks", type=int, default=6, help="that are measured of each size")
    parser.add_argument("--images", type=int, nargs="*", default=[10**5, 10**6, 10**7])
    parser.add_argument("--cores", type=int, default=32)


def run(options: argparse.Namespace, _: torch.device) -> Iterator[Measurement]:
    """Measure, plan, print the table, yield the figures."""
    alone = LocalExecutor(1, fresh=True)
    found = {}
    for count in sorted(options.hashes):
        [found[count]] = alone.map(partial(measured, options.tasks), [count])
    largest = max(found)
    plan = {count: planned(count, largest, found[largest]) for count in options.planned}
    print(table(found, plan, options.cores), end="\n\n")
    own = {}
    for count in sorted(options.images):
        [own[count]] = alone.map(partial(own_cost, options.tasks), [count])
    if own:
        print(own_table(own, options.planned), end="\n\n")
    for count, cost in own.items():
        place = f"near_hashes/own/{count}"
        yield Measurement(f"{place}/time", 1e6 * cost.seconds / count, "µs an image")
        yield Measurement(f"{place}/memory", cost.bytes / 1e6, "MB")
    for count, one in found.items():
        place = f"near_hashes/{count}"
        yield Measurement(f"{place}/time", 1e6 * one.seconds / count, "µs a hash")
        yield Measurement(f"{place}/memory", one.bytes / 1e6, "MB a task")


main = partial(harness.run_benchmark, __doc__, add_options, run, cpu_only=True)


if __name__ == "__main__":
    sys.exit(main())
