"""Time and memory of the search for near-duplicates by the number of hashes, and a plan at 10⁹.

    OMP_NUM_THREADS=1 python -m evaluation.benchmarks.data.near_hashes --hashes 1000000 10000000

Random hashes of 64 bits, one in a hundred a copy in which one bit differs. The tasks of a search
are alike, so `--tasks` of them are measured, each size in a process of its own, and the time of all
is worked out. Memory is the peak that one task adds to the hashes, which all tasks share.

The plan scales the largest measured size by the comparisons that a hash costs
(`data_tools.dedup.near_duplicates.least_cost`) to `--planned` hashes on `--cores` cores.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from data_tools.dedup.near_duplicates import least_cost, pairs_of_sorting, sortings
from data_tools.dedup.perceptual_hash import DISTANCE
from data_tools.executor.local import LocalExecutor
from evaluation.benchmarks import harness
from evaluation.benchmarks.harness import Measurement


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
    tasks = sortings(DISTANCE, count)
    some = np.linspace(0, len(tasks) - 1, min(most, len(tasks))).astype(int).tolist()
    before, started = _peak(), time.process_time()
    for number in some:
        for _ in pairs_of_sorting(hashes, DISTANCE, tasks[number]):
            pass
    seconds = time.process_time() - started
    return SearchCost(len(tasks), seconds * len(tasks) / len(some), _peak() - before)


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def planned(count: int, size: int, search: SearchCost) -> SearchCost:
    """Scale what `size` hashes took to another number."""
    cost = least_cost(DISTANCE, count)[0] / least_cost(DISTANCE, size)[0]
    return SearchCost(
        len(sortings(DISTANCE, count)), search.seconds * cost * count / size, search.bytes
    )


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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the sizes, what is planned, and how much is measured."""
    parser.add_argument("--hashes", type=int, nargs="+", default=[10**5, 10**6, 10**7, 10**8])
    parser.add_argument("--planned", type=int, nargs="*", default=[10**9])
    parser.add_argument("--tasks", type=int, default=6, help="that are measured of each size")
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
    for count, one in found.items():
        place = f"near_hashes/{count}"
        yield Measurement(f"{place}/time", 1e6 * one.seconds / count, "µs a hash")
        yield Measurement(f"{place}/memory", one.bytes / 1e6, "MB a task")


main = partial(harness.run_benchmark, __doc__, add_options, run, cpu_only=True)


if __name__ == "__main__":
    sys.exit(main())
