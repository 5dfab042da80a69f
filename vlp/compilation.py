"""Marks for `torch.compile` and for GPUs in layers, losses and encodings.

`region` marks a function of tensors, such as a loss, to be compiled as one graph: on a GPU its
dozens of small operations take longer to launch than to run. `on_gpu` selects one of two equal
forms: on a GPU with fixed sizes, so that no number is read back, and with kernels that a CPU lacks.
`once` marks a log line.
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
_everywhere = False


class _Compilable:
    """A function, compiled once options are set."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = self.run = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def region(function: Function) -> Function:
    """Mark a function at the top level of a module as one graph of compiled trainings."""
    marked = _Compilable(function)
    _REGIONS.append(marked)
    return marked  # type: ignore[return-value]


def compile_regions(options: Mapping[str, Any] | None) -> None:
    """Compile all regions at their next run, by options of `torch.compile`; None: uncompiled."""
    # A number that changes from step to step, such as the teacher's share, becomes an input.
    for marked in _REGIONS:
        function = marked.function
        marked.run = function if options is None else torch.compile(function, **options)


def on_gpu(x: Tensor) -> bool:
    """Return whether a tensor, of any shape, is computed in the form for a GPU."""
    return x.is_cuda or _everywhere


def off_cpu(x: Tensor) -> bool:
    """Return whether a tensor, of any shape, is computed as on an accelerator of any kind."""
    return x.device.type != "cpu" or _everywhere


@contextmanager
def gpu_form() -> Iterator[None]:
    """Compute in the form for a GPU on any device, within this context."""
    # For counting a step's operations, and for tests with Triton's interpreter.
    global _everywhere
    before, _everywhere = _everywhere, True
    try:
        yield
    finally:
        _everywhere = before


def once(log: Callable[..., None]) -> Callable[..., None]:
    """Make a logging function run once per arguments, which must be constants.

    The compiler runs it while tracing, outside the graph. `cache_clear` resets it.
    """
    cached = functools.cache(log)

    @functools.wraps(log)
    def run(*constants: Hashable) -> None:
        cached(*constants)

    # The mark is that of torch.compiler.assume_constant_result, which takes seconds to import.
    vars(run).update(_dynamo_marked_constant=True, cache_clear=cached.cache_clear)
    return run
