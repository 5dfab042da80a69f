"""A model on a device, in evaluation mode and in the precision that it is evaluated in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from vlp.config import Precision
from vlp.distributed import default_device
from vlp.tasks.task import autocast


@contextmanager
def evaluating(
    model: nn.Module, device: torch.device | str | None = None
) -> Iterator[torch.device]:
    """Move the model, put it into evaluation mode, and give the device; None is this rank's own.

    Afterwards every submodule is back in its own mode; the model stays where it is.
    """
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
    """Compute in a precision; None is bf16, and TF32 where that has no say, on GPUs that have both.

    Elsewhere None is float32. Similarities of features are computed outside, in float32.
    """
    if precision is not None or device.type != "cuda" or not torch.cuda.is_bf16_supported(False):
        with autocast(device, precision or "float32"):
            yield
        return
    with _TF32, autocast(device, "bf16"):
        yield


class _Tf32:
    """TF32 for float32 products of the process, until the last thread inside has left."""

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
