"""Pause of the training loop for a checkpoint by bytes of state, and what it is for 7 B parameters.

    OMP_NUM_THREADS=1 python -m evaluation.benchmarks.checkpoint_pause --folder runs/pause

The engine `ddp` holds float32 weights and AdamW's moments of linear layers, 12 bytes a parameter,
on one rank. Saves that are waited for and saves in the background take turns, in both forms of a
checkpoint; each writes to the disk of `--folder`, with checksums. The pause is the time until
`save` returns. While a checkpoint is written in the background a thread multiplies small matrices;
the longest gap between two of them is how long a loop in Python would have been held.

The first copy waits for its memory to be mapped, or pinned; it is printed apart. Seconds for 7 B
parameters are computed: bytes of one rank by the measured rate of the largest state.

Prints tables and, last, one JSON line per figure.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from evaluation.benchmarks import harness
from evaluation.benchmarks.harness import Measurement
from vlp import distributed
from vlp.config import ConfigError
from vlp.training.checkpoints.checkpoint import Checkpoints
from vlp.training.config import LoopConfig, RunConfig
from vlp.training.engines.ddp import DdpEngine
from vlp.training.engines.environment import keep_freed_memory
from vlp.training.logging.progress import Progress

FORMS = ("full", "sharded")
WIDTH = 1024
PER_PARAMETER = 12
"""Bytes of a float32 weight and two moments."""

PARAMETERS, RANKS, TARGET = 7e9, (8, 64, 256, 1024), 1.0


class Pauses(NamedTuple):
    """Seconds of the saves of one form, in the order in which they were measured.

    first: until the first save in the background returned; waited: until those returned that write
    at once; background: until the others did; written: from there until these were on the disk.
    gap: the longest that Python was withheld meanwhile.
    """

    first: float
    waited: list[float]
    background: list[float]
    written: list[float]
    gap: float


class Layers(nn.Module):
    """Linear layers as a task that is saved, and never trained.

    Args:
        number: of layers of `WIDTH`.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(number))

    def extra_state(self) -> dict[str, torch.Tensor]:
        """Return nothing."""
        return {}


def measure(gigabytes: float, form: str, rounds: int, folder: Path) -> tuple[int, Pauses]:
    """Save a state by turns; return its bytes and the pauses.

    Args:
        gigabytes: of the state, about.
        form: of `training.checkpoint_format`.
        rounds: saves that are waited for, and as many in the background.
        folder: of the checkpoints.
    """
    task: Any = Layers(max(1, round(gigabytes * 1e9 / PER_PARAMETER / WIDTH**2)))
    training = LoopConfig.model_validate({"checkpoint_format": form, "keep_last": 1})
    engine = DdpEngine(task, training)
    checkpoints = Checkpoints(folder, RunConfig(training=training))
    step, first, gap = 0, 0.0, 0.0
    waited: list[float] = []
    background: list[float] = []
    written: list[float] = []
    for _ in range(rounds + 1):
        step += 1
        save = partial(checkpoints.save, engine, task, Progress(step=step), wait=False)
        background.append(harness.seconds(save, engine.device))
        began = time.perf_counter()
        gap = max(gap, _longest_gap(checkpoints.wait))
        written.append(time.perf_counter() - began)
        step += 1
        save = partial(checkpoints.save, engine, task, Progress(step=step))
        waited.append(harness.seconds(save, engine.device))
    first, *background = background
    checkpoints.close()
    size = PER_PARAMETER * sum(parameter.numel() for parameter in task.parameters())
    return size, Pauses(first, waited[1:], background, written[1:], gap)


def _longest_gap(wait: Callable[[], None]) -> float:
    """Wait, and return the longest time between two products of a thread meanwhile."""
    longest, over = 0.0, threading.Event()

    def multiply() -> None:
        nonlocal longest
        x, before = torch.zeros(16, 16), time.perf_counter()
        while not over.is_set():
            x @= x
            now = time.perf_counter()
            longest, before = max(longest, now - before), now

    thread = threading.Thread(target=multiply)
    thread.start()
    try:
        wait()
    finally:
        over.set()
        thread.join()
    return longest


def computed(rate: float) -> dict[int, tuple[float, float]]:
    """Return bytes of a rank, and seconds to copy them, of `PARAMETERS` by number of ranks.

    Args:
        rate: bytes per second.
    """
    sizes = {ranks: PARAMETERS * PER_PARAMETER / ranks for ranks in RANKS}
    return {ranks: (size, size / rate) for ranks, size in sizes.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the sizes, the number of saves and the disk."""
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.1, 0.5, 1.0, 2.0])
    parser.add_argument("--rounds", type=int, default=5, help="saves of each kind")
    parser.add_argument("--folder", type=Path, help="of the disk (default: temporary files)")


def run(options: argparse.Namespace, device: torch.device) -> Iterator[Measurement]:
    """Print both tables, yield pauses and the rate."""
    if device.type != distributed.default_device().type:
        raise ConfigError("--device: an engine takes the GPU that it sees; hide it from it")
    if device.type == "cpu":
        keep_freed_memory()
    rows, figures, rates = [], [], {}
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    for gigabytes in options.gigabytes:
        for form in FORMS:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                size, found = measure(gigabytes, form, options.rounds, Path(folder))
            pause = statistics.median(found.background)
            rates[form] = size / pause
            medians = [statistics.median(found.waited), statistics.median(found.written)]
            times = [pause, max(found.background), found.first, *medians]
            rows.append(
                [
                    f"{size / 1e9:.2f} GB, {form}",
                    *(f"{seconds:.3f}" for seconds in times),
                    f"{rates[form] / 1e9:.1f}",
                    f"{1e3 * found.gap:.0f}",
                ]
            )
            name = f"checkpoint_pause/{form}_{gigabytes:g}_gb"
            figures.append(Measurement(f"{name}/background", pause, "s"))
            figures.append(Measurement(f"{name}/waited", medians[0], "s"))
            figures.append(Measurement(f"{name}/gap", found.gap, "s"))
    head = ["state", "pause, s", "longest", "first", "if waited for", "written in"]
    print(harness.table([*head, "GB/s", "gap, ms"], rows), end="\n\n")
    rate = min(rates.values())
    seven = computed(rate)
    rows = [
        [str(ranks), f"{size / 1e9:.2f}", f"{seconds:.2f}"]
        for ranks, (size, seconds) in seven.items()
    ]
    print(harness.table(["7 B parameters on ranks", "GB a rank", "pause, s"], rows), end="\n\n")
    yield from figures
    yield Measurement("checkpoint_pause/rate", rate / 1e9, "GB/s")
    yield Measurement("checkpoint_pause/7b_on_64_ranks", seven[64][1], "s", TARGET, TARGET / 4)


main = partial(harness.run_benchmark, __doc__, add_options, run)


if __name__ == "__main__":
    sys.exit(main())
