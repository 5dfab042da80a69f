"""Work of an evaluation split over ranks, and models in evaluation mode on a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from vlp import distributed
from vlp.config import Precision
from vlp.distributed import default_device
from vlp.tasks.task import autocast

Result = TypeVar("Result")


class ProcessGroup(NamedTuple):
    """Rank of this process and number of processes; a single process is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1

    @classmethod
    def current(cls) -> ProcessGroup:
        """Return the running process group, or a single process."""
        return cls(distributed.rank(), distributed.world_size())

    @property
    def first(self) -> bool:
        """Return True on the rank that prints and writes."""
        return self.rank == 0

    def map_blocks(self, count: int, work: Callable[[int], Result]) -> list[Result]:
        """Split `work(block)` of `count` blocks over the ranks; return all results in order.

        With fewer blocks than ranks, the last ranks work. An error of one rank is raised on all.
        """
        local: dict[int, Result] = {}
        failure: Exception | None = None
        try:
            local = {block: work(block) for block in self.share(count)}
        except Exception as error:
            failure = error
        if self.world_size == 1:
            if failure is not None:
                raise failure
            return [local[block] for block in range(count)]
        # Also after an error, as the other ranks wait in this collective call.
        gathered = distributed.gather_to_all((local, None if failure is None else repr(failure)))
        if failure is not None:
            raise failure
        for rank, (_, message) in enumerate(gathered):
            if message is not None:
                raise RuntimeError(f"evaluation failed on rank {rank}: {message}")
        merged = {block: result for blocks, _ in gathered for block, result in blocks.items()}
        return [merged[block] for block in range(count)]

    def share(self, count: int) -> range:
        """Return this rank's consecutive blocks; lengths differ by at most one."""
        return range(
            self.rank * count // self.world_size, (self.rank + 1) * count // self.world_size
        )


@contextmanager
def evaluating(
    model: nn.Module, device: torch.device | str | None = None
) -> Iterator[torch.device]:
    """Move the model to the device (None: this rank's), set evaluation mode, yield the device.

    Afterwards the modes of all submodules are restored; the model stays on the device.
    """
    # Frozen submodules may be in evaluation mode while the model trains: store all modes.
    torch_device = torch.device(device) if device is not None else default_device()
    modes = [(module, module.training) for module in model.modules()]
    model.to(torch_device).eval()
    try:
        yield torch_device
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def inference(device: torch.device, precision: Precision | None) -> Iterator[None]:
    """Compute in a precision; None: bf16 autocast and TF32 on a GPU with bf16, else float32."""
    if precision is not None or device.type != "cuda" or not torch.cuda.is_bf16_supported(False):
        with autocast(device, precision or "float32"):
            yield
        return
    with _TF32, autocast(device, "bf16"):
        yield


class _Tf32:
    """Context in which float32 products use TF32; the setting is global, so threads are counted."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, ""

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.get_float32_matmul_precision()
                torch.set_float32_matmul_precision("high")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.set_float32_matmul_precision(self._before)


_TF32 = _Tf32()
