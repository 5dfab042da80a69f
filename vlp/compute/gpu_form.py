"""Which of two equal forms computes: the one for a GPU, or the one for a CPU.

A GPU must not be asked for a number, so its form has fixed sizes, and it has kernels that a CPU
lacks. Counts of a step, and tests with Triton's interpreter, take its form on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_everywhere = False


def on_gpu(x: Tensor) -> bool:
    """Return whether a tensor, of any shape, is computed in the form for a GPU."""
    return x.is_cuda or _everywhere


def off_cpu(x: Tensor) -> bool:
    """Return whether a tensor, of any shape, is computed as on an accelerator of any kind."""
    return x.device.type != "cpu" or _everywhere


@contextmanager
def gpu_form() -> Iterator[None]:
    """Compute in the form for a GPU wherever tensors lie, within this context."""
    global _everywhere
    before, _everywhere = _everywhere, True
    try:
        yield
    finally:
        _everywhere = before
