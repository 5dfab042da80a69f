"""Tensors that depend on sizes alone: made once and shared by all layers of all models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

Sizes = ParamSpec("Sizes")


def shared(kept: int) -> Callable[[Callable[Sizes, Tensor]], Callable[Sizes, Tensor]]:
    """Keep the latest results of a function of sizes, names, number types and devices.

    They are made outside inference mode, as a tensor born in it could serve no backward pass later,
    and outside the modes of tracing, as one born under `torch.export` is fake: it has no numbers,
    and models that read it later learn nothing. `torch.compile`, which ignores caches, takes the
    result for a constant of the sizes that it compiles for.

    Args:
        kept: number of results.
    """

    def decorate(make: Callable[Sizes, Tensor]) -> Callable[Sizes, Tensor]:
        def real(*sizes: Sizes.args, **names: Sizes.kwargs) -> Tensor:
            with torch.inference_mode(False), _disable_current_modes():
                return make(*sizes, **names)

        keep = cast("Callable[Sizes, Tensor]", functools.lru_cache(maxsize=kept)(real))

        def constant(*sizes: Sizes.args, **names: Sizes.kwargs) -> Tensor:
            return keep(*sizes, **names)

        # `torch.compiler.assume_constant_result` does no more, but imports the compiler first.
        constant._dynamo_marked_constant = True  # type: ignore[attr-defined]

        @functools.wraps(make)
        def result(*sizes: Sizes.args, **names: Sizes.kwargs) -> Tensor:
            if torch.compiler.is_dynamo_compiling():
                fixed = {name: _fixed(value) for name, value in names.items()}
                return constant(*(_fixed(size) for size in sizes), **fixed)
            return keep(*sizes, **names)

        return result

    return decorate


def _fixed(size: Any) -> Any:
    """Turn sizes into numbers where `torch.compile(dynamic=True)` has symbols for them."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # takes half a second

    if isinstance(size, tuple):
        return tuple(_fixed(one) for one in size)
    return guard_scalar(size) if isinstance(size, int | float) else size
