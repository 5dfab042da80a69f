"""Functions of tensors that a compiled training runs as one graph each, such as losses.

On a GPU a loss is dozens of small operations, which take longer to launch than to run. A module
says where it may be compiled by being one (`nn.Module.compile`); a function says so by `region`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_REGIONS: list[_Compilable] = []


class _Compilable:
    """A function, compiled once it has been told how."""

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
    """Compile all of them when they next run, by options of `torch.compile`; None: as written.

    A number that changes from step to step, such as the teacher's share, becomes an input.
    """
    for marked in _REGIONS:
        function = marked.function
        marked.run = function if options is None else torch.compile(function, **options)
