"""The windowed anchor path (Eq. 7) as an operator that Triton kernels compute.

Of equally near sources the first wins and receives the whole gradient (the order is tokens, rows,
columns), whereas PyTorch's minimum shares it.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vlp.positions.kernel_operator import KernelOperator
from vlp.positions.windows import Metric

_BLOCK = 256
# The patches of a window are unrolled; with more of them compiling takes too long.
_FARTHEST_PATCH = 4


def fits(text_reach: int, patch_reach: int) -> bool:
    """Return whether the kernel takes a window: up to 9 x 9 patches, and fewer than 2^15 steps."""
    return patch_reach <= _FARTHEST_PATCH and _steps(text_reach, patch_reach) < 2**15


def windowed_path(
    distance: Tensor,
    grid: tuple[int, int],
    words: Tensor | None,
    text_reach: int,
    patch_reach: int,
    metric: Metric,
) -> tuple[Tensor, Tensor]:
    """Shortest anchor path within windows (Eq. 7, papers.md#ace-a10 to #ace-a15), differentiable
    once.

    Half precision is computed in float32. The arguments are those that
    `vlp.positions.anchor.anchor_path` has checked.

    Args:
        distance: (B, M, N, G) with any strides, from `anchor_distance`.
        grid: (rows, columns) of the patches, M = rows * columns.
        words: (B, N) bool, True = a real word.
        text_reach: tokens to either side.
        patch_reach: patches to either side, along rows and columns.
        metric: distance between patches, in patches.

    Returns:
        The path (B, M, N, G), 0 where nothing is reachable, and the boolean `reachable`.
    """
    note = distance.requires_grad and torch.is_grad_enabled()
    window = [*grid, text_reach, patch_reach]
    path, reachable, _ = _path(distance, words, window, metric, note)
    return path, reachable


@functools.cache
def _kernels() -> ModuleType:
    """Triton, and what it compiles, are imported where a kernel runs first."""
    return importlib.import_module("vlp.positions.anchor_triton")


def _launch(
    distance: Tensor, words: Tensor | None, window: list[int], metric: str, note: bool
) -> tuple[Tensor, Tensor, Tensor]:
    path, reachable, winner = _results(distance, words, window, metric, note)
    seen = reachable.view(torch.uint8)
    if path.numel():
        with torch.cuda.device(path.get_device()):
            _kernels().path_forward_kernel[_programs(path)](
                distance,
                seen if words is None else words.contiguous().view(torch.uint8),
                path,
                seen,
                winner if note else seen,
                *distance.stride(),
                *path.stride(),
                **_options(path, window, metric),
                MASKED=words is not None,
                NOTE_WINNER=note,
            )
    return path, reachable, winner


def _results(
    distance: Tensor, words: Tensor | None, window: list[int], metric: str, note: bool
) -> tuple[Tensor, Tensor, Tensor]:
    path = torch.empty_like(distance)
    reachable = torch.empty_like(path, dtype=torch.bool)
    kind = torch.uint8 if _steps(*window[2:]) < 256 else torch.int16
    return path, reachable, torch.empty_like(path if note else path[:0], dtype=kind)


def _launch_backward(above: Tensor, winner: Tensor, window: list[int], metric: str) -> Tensor:
    gradient = torch.empty_like(winner, dtype=above.dtype)
    if gradient.numel():
        with torch.cuda.device(gradient.get_device()):
            _kernels().path_backward_kernel[_programs(gradient)](
                above,
                winner,
                gradient,
                *above.stride(),
                *gradient.stride(),
                **_options(gradient, window, metric),
            )
    return gradient


def _gradient(above: Tensor, winner: Tensor, window: list[int], metric: str) -> Tensor:
    return torch.empty_like(winner, dtype=above.dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.window, ctx.metric = inputs[2:4]
    ctx.save_for_backward(output[2])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, above: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    (winner,) = ctx.saved_tensors
    gradient = _path_backward(above, winner, ctx.window, ctx.metric)
    return gradient, None, None, None, None


_path = KernelOperator("windowed_path", _launch, _results, _keep, _differentiate)
_path_backward = KernelOperator("windowed_path_backward", _launch_backward, _gradient)


def _options(path: Tensor, window: list[int], metric: str) -> dict[str, Any]:
    rows, columns, text_reach, patch_reach = window
    language = importlib.import_module("triton.language")
    return {
        "tokens": path.shape[2],
        "groups": path.shape[3],
        "ROWS": rows,
        "COLUMNS": columns,
        "TEXT": text_reach,
        "PATCH": patch_reach,
        "METRIC": metric,
        "STEPS": _steps(text_reach, patch_reach),
        "GROUPS_LAST": path.stride(3) == 1,
        "TYPE": getattr(language, "float64" if path.dtype == torch.float64 else "float32"),
        "BLOCK": _BLOCK,
    }


def _steps(text_reach: int, patch_reach: int) -> int:
    return (2 * text_reach + 1) * (2 * patch_reach + 1) ** 2


def _programs(x: Tensor) -> tuple[int]:
    return (len(x) * -(-x[0].numel() // _BLOCK),)
