"""Part B: waits for the device in whole steps of the training loop, of which few are watched."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evaluation.benchmarks.gpu.figures import CheckedFigure, Setting
from evaluation.benchmarks.pretrain_step import random_batch
from vlp.data.stream.batch import Slots
from vlp.tasks.pretraining import Pretraining
from vlp.training.config import PretrainConfig
from vlp.training.engines.ddp import DdpEngine
from vlp.training.loop import train
from vlp.training.run_folder import RunFolder

T = TypeVar("T")
ROWS = 4
LOG_EVERY = 4
WARM_UP = 2 * LOG_EVERY  # the first steps allocate
_WARNING = "called a synchronizing CUDA operation"


def waits(setting: Setting) -> Iterator[CheckedFigure]:
    """Count the waits in an ordinary step of the loop and in one that is logged.

    A step is the forward and the backward pass, the optimiser and the teacher's update.
    """
    config, device = watched_config(setting.config, ROWS), setting.device
    torch.manual_seed(0)
    task = Pretraining(config.model, config.objectives, "", "bf16", LOG_EVERY)
    batch = random_batch(config.inputs, ROWS, 3)
    steps = watched_steps(config, task, batch, partial(counted_waits, device))
    for name, step, promise in (("ordinary", steps[0], 0), ("logged", steps[-1], 1)):
        yield waits_figure(f"waits for the device in one {name} step", step, promise, device)


def waits_figure(name: str, found: list[str], promise: int, device: torch.device) -> CheckedFigure:
    """Print waits, return how many; forms for a CPU read numbers, which costs nothing there."""
    print(f"{name}:", *found, sep="\n  ")
    on_gpu = device.type == "cuda"
    return CheckedFigure(
        name, len(found), "", at_most=promise if on_gpu else None, correctness=on_gpu
    )


@contextmanager
def counted_waits(device: torch.device) -> Iterator[list[str]]:
    """Give a list that gets a line for every wait of the host within the context.

    On a GPU PyTorch warns of them, with file and line; elsewhere every number that is read is one.
    """
    found: list[str] = []
    if device.type != "cuda":
        with _Reads(found):
            yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [f"{one.filename}:{one.lineno}" for one in caught if _WARNING in str(one.message)]


class _Reads(TorchDispatchMode):
    """Notes operations that hand a number of the device to the CPU."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


class EnoughSteps(Exception):
    """All steps that are watched are done."""


class WatchedData(Generic[T]):
    """Data of one batch again and again, which watch what happens from one to the next.

    Args:
        batch: of every step, on the CPU, as a loader gives it.
        rows: samples of it.
        watch: makes the context of each step after the warm-up; `steps` gets what they give.
    """

    def __init__(
        self, batch: Slots, rows: int, watch: Callable[[], AbstractContextManager[T]]
    ) -> None:
        self.batch, self.rows, self.watch = batch, rows, watch
        self.fingerprint = {"source": "none"}
        self.steps: list[T] = []

    def floor(self, samples_consumed: int) -> int:
        """Return that a run can go on after any number of samples."""
        return samples_consumed

    def batches_left(self, samples_consumed: int, epochs: int) -> int:
        """Count more batches than are trained on."""
        return 1000

    def samples_in_epoch(self, epoch: int) -> int:
        """Count more samples than are trained on."""
        return 10**9

    def batches(
        self, samples_consumed: int = 0, rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Slots, int]]:
        """Yield the batch to the warm-up, and to the steps from there to a logged one.

        Raises:
            EnoughSteps: in place of the next.
        """
        for number in range(WARM_UP):
            yield self.batch, self.rows * (number + 1)
        for number in range(WARM_UP, WARM_UP + LOG_EVERY):
            with self.watch() as found:
                yield self.batch, self.rows * (number + 1)
            self.steps.append(found)
        raise EnoughSteps


def watched_config(config: PretrainConfig, rows: int) -> PretrainConfig:
    """Return a configuration for `watched_steps`, whose batches have `rows` pairs."""
    changes = {
        "batch": rows,
        "steps": 1000,
        "log_every": LOG_EVERY,
        "trackers": (),
        "max_non_finite": 10**6,
    }
    training = config.training.model_copy(update=changes)
    return config.model_copy(update={"training": training})


def watched_steps(
    config: PretrainConfig,
    task: Any,
    batch: Slots,
    watch: Callable[[], AbstractContextManager[T]],
) -> list[T]:
    """Train on one batch; return what contexts of steps give: ordinary ones, the last is logged.

    Args:
        config: of `watched_config`; its model need not be the task's.
        task: a `Task` and module, whose log lines are due every `LOG_EVERY` steps.
        batch: of `config.training.batch` rows, on the CPU.
        watch: makes a context.
    """
    data = WatchedData(batch, config.training.batch, watch)
    with tempfile.TemporaryDirectory() as folder, suppress(EnoughSteps):
        config = config.model_copy(update={"output": folder})
        engine = DdpEngine(task, config.training)
        train(config, task, data, engine, RunFolder(Path(folder), True))
    return data.steps
