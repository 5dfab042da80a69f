"""Hooks for `torch.compile` and for GPUs in layers, losses and encodings.

`region` marks a function of tensors, such as a loss, to be compiled as one graph: on a GPU its
dozens of small operations take longer to launch than to run. `on_gpu` selects between two equal
computations; the form for a GPU has fixed sizes, so that no number is read back, and kernels that a
CPU lacks. `log_once` logs from compiled code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

_REGIONS: list[_Compilable] = []
_force_gpu_form = False


class _Compilable:
    """A function that runs as it is written or compiled (`compile_regions`)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = self.run = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def region(function: Function) -> Function:
    """Mark a function at the top level of a module as one graph of compiled trainings."""
    compilable = _Compilable(function)
    _REGIONS.append(compilable)
    return compilable  # type: ignore[return-value]


def compile_regions(options: Mapping[str, Any] | None) -> None:
    """Compile all regions at their next run, by options of `torch.compile`; None: uncompiled."""
    for compilable in _REGIONS:
        function = compilable.function
        compilable.run = function if options is None else torch.compile(function, **options)


def on_gpu(x: Tensor) -> bool:
    """Return whether to compute with a tensor, of any shape, in the form for a GPU."""
    return x.is_cuda or _force_gpu_form


def off_cpu(x: Tensor) -> bool:
    """Return whether to compute with a tensor, of any shape, as on an accelerator of any kind."""
    return x.device.type != "cpu" or _force_gpu_form


@contextmanager
def gpu_form() -> Iterator[None]:
    """Compute in the form for a GPU on any device, within this context."""
    # For counting a step's operations, and for tests with Triton's interpreter.
    global _force_gpu_form
    previous, _force_gpu_form = _force_gpu_form, True
    try:
        yield
    finally:
        _force_gpu_form = previous


def log_once(log: Callable[..., None]) -> Callable[..., None]:
    """Make a logging function log each set of arguments only once.

    Arguments must be constants: the compiler calls the function while tracing, outside the graph.
    `cache_clear` resets it.
    """
    cached_log = functools.cache(log)

    @functools.wraps(log)
    def run(*constants: Hashable) -> None:
        cached_log(*constants)

    # What torch.compiler.assume_constant_result sets; importing that takes seconds.
    vars(run).update(_dynamo_marked_constant=True, cache_clear=cached_log.cache_clear)
    return run
