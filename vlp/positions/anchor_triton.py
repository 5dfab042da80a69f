"""The windowed anchor path (Eq. 7) as one Triton kernel forward and one backward.

A program finds the paths of a block of (patch, token, group) entries of one pair. It looks at every
source in the window of each entry; neighbours share most of them, so they come from the cache and
global memory is read and written once. Forward notes which step of the window won, in one byte;
backward asks every entry around a source whether that source had won there. No atomics: equal
inputs give equal gradients. `TRITON_INTERPRET=1`, set before this module is imported, runs both on
a CPU, for tests.

Of equally near sources the first wins and receives the whole gradient (the order is tokens, rows,
columns), whereas PyTorch's minimum shares it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

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
    return _WindowedPath.apply(distance, grid, words, text_reach, patch_reach, metric)


class _WindowedPath(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        distance: Tensor,
        grid: tuple[int, int],
        words: Tensor | None,
        text_reach: int,
        patch_reach: int,
        metric: Metric,
    ) -> tuple[Tensor, Tensor]:
        path = torch.empty_like(distance)
        reachable = torch.empty_like(path, dtype=torch.bool)
        seen = reachable.view(torch.uint8)
        steps = _steps(text_reach, patch_reach)
        note = ctx.needs_input_grad[0]
        winner = seen
        if note:
            winner = torch.empty_like(path, dtype=torch.uint8 if steps < 256 else torch.int16)
        ctx.options = {
            "tokens": path.shape[2],
            "groups": path.shape[3],
            "ROWS": grid[0],
            "COLUMNS": grid[1],
            "TEXT": text_reach,
            "PATCH": patch_reach,
            "METRIC": metric,
            "STEPS": steps,
            "GROUPS_LAST": path.stride(3) == 1,
            "TYPE": tl.float64 if path.dtype == torch.float64 else tl.float32,
            "BLOCK": _BLOCK,
        }
        if path.numel():
            with torch.cuda.device(path.get_device()):
                _forward_kernel[_programs(path)](
                    distance,
                    seen if words is None else words.contiguous().view(torch.uint8),
                    path,
                    seen,
                    winner,
                    *distance.stride(),
                    *path.stride(),
                    **ctx.options,
                    MASKED=words is not None,
                    NOTE_WINNER=note,
                )
        ctx.mark_non_differentiable(reachable)
        if note:
            ctx.save_for_backward(winner)
        return path, reachable

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, path_gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (winner,) = ctx.saved_tensors
        gradient = torch.empty_like(winner, dtype=path_gradient.dtype)
        if gradient.numel():
            with torch.cuda.device(gradient.get_device()):
                _backward_kernel[_programs(gradient)](
                    path_gradient,
                    winner,
                    gradient,
                    *path_gradient.stride(),
                    *gradient.stride(),
                    **ctx.options,
                )
        return gradient, None, None, None, None, None


def _steps(text_reach: int, patch_reach: int) -> int:
    return (2 * text_reach + 1) * (2 * patch_reach + 1) ** 2


def _programs(x: Tensor) -> tuple[int]:
    return (len(x) * triton.cdiv(x[0].numel(), _BLOCK),)


@triton.jit
def _entries(
    tokens: tl.tensor,
    groups: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Pair, patch, token and group of this program's entries, in the order of memory."""
    patches = ROWS * COLUMNS
    blocks = (patches * tokens * groups + BLOCK - 1) // BLOCK
    pair = tl.program_id(0) // blocks
    entry = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < patches * tokens * groups
    if GROUPS_LAST:
        group = entry % groups
        token = (entry // groups) % tokens
        patch = entry // (groups * tokens)
    else:
        token = entry % tokens
        patch = (entry // tokens) % patches
        group = entry // (tokens * patches)
    return pair.to(tl.int64), patch, token, group, inside


@triton.constexpr_function
def _length(down: int, right: int, metric: str) -> float:
    """Distance between patches, in patches; evaluated while a kernel is compiled."""
    if metric == "euclidean":
        return (down * down + right * right) ** 0.5
    if metric == "manhattan":
        return abs(down) + abs(right)
    return max(abs(down), abs(right))


@triton.jit
def _forward_kernel(
    distance: tl.tensor,
    words: tl.tensor,
    path: tl.tensor,
    reachable: tl.tensor,
    winner: tl.tensor,
    distance_pair: tl.tensor,
    distance_patch: tl.tensor,
    distance_token: tl.tensor,
    distance_group: tl.tensor,
    path_pair: tl.tensor,
    path_patch: tl.tensor,
    path_token: tl.tensor,
    path_group: tl.tensor,
    tokens: tl.tensor,
    groups: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TEXT: tl.constexpr,
    PATCH: tl.constexpr,
    METRIC: tl.constexpr,
    STEPS: tl.constexpr,
    GROUPS_LAST: tl.constexpr,
    TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    NOTE_WINNER: tl.constexpr,
) -> None:
    pair, patch, token, group, inside = _entries(tokens, groups, ROWS, COLUMNS, GROUPS_LAST, BLOCK)
    row, column = patch // COLUMNS, patch % COLUMNS
    target = inside
    if MASKED:
        words += pair * tokens
        target = inside & (tl.load(words + token, mask=inside, other=0) != 0)
    source = distance + pair * distance_pair
    source += patch * distance_patch + token * distance_token + group * distance_group
    best = tl.full((BLOCK,), float("inf"), TYPE)
    won = tl.full((BLOCK,), STEPS, tl.int32)
    side: tl.constexpr = 2 * PATCH + 1
    for along in range(-TEXT, TEXT + 1):
        near = token + along
        steps_along = tl.abs(near - token).to(TYPE)
        real = target & (near >= 0) & (near < tokens)
        if MASKED:
            real = real & (tl.load(words + near, mask=real, other=0) != 0)
        for down in tl.static_range(-PATCH, PATCH + 1):
            line = real & (row + down >= 0) & (row + down < ROWS)
            for right in tl.static_range(-PATCH, PATCH + 1):
                there = line & (column + right >= 0) & (column + right < COLUMNS)
                offset = (down * COLUMNS + right) * distance_patch + along * distance_token
                value = tl.load(source + offset, mask=there, other=float("inf")).to(TYPE)
                value = (value + steps_along) + _length(down, right, METRIC)
                nearer = value < best
                best = tl.where(nearer, value, best)
                if NOTE_WINNER:
                    step = ((along + TEXT) * side + down + PATCH) * side + right + PATCH
                    won = tl.where(nearer, step, won)
    found = best < float("inf")
    place = pair * path_pair + patch * path_patch + token * path_token + group * path_group
    tl.store(path + place, tl.where(found, best, 0.0), mask=inside)
    tl.store(reachable + place, found, mask=inside)
    if NOTE_WINNER:
        tl.store(winner + place, won, mask=inside)


@triton.jit
def _backward_kernel(
    path_gradient: tl.tensor,
    winner: tl.tensor,
    gradient: tl.tensor,
    path_pair: tl.tensor,
    path_patch: tl.tensor,
    path_token: tl.tensor,
    path_group: tl.tensor,
    gradient_pair: tl.tensor,
    gradient_patch: tl.tensor,
    gradient_token: tl.tensor,
    gradient_group: tl.tensor,
    tokens: tl.tensor,
    groups: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TEXT: tl.constexpr,
    PATCH: tl.constexpr,
    METRIC: tl.constexpr,
    STEPS: tl.constexpr,
    GROUPS_LAST: tl.constexpr,
    TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    pair, patch, token, group, inside = _entries(tokens, groups, ROWS, COLUMNS, GROUPS_LAST, BLOCK)
    row, column = patch // COLUMNS, patch % COLUMNS
    place = pair * gradient_pair
    place += patch * gradient_patch + token * gradient_token + group * gradient_group
    above = path_gradient + pair * path_pair
    above += patch * path_patch + token * path_token + group * path_group
    total = tl.full((BLOCK,), 0.0, TYPE)
    side: tl.constexpr = 2 * PATCH + 1
    for along in range(-TEXT, TEXT + 1):
        real = inside & (token - along >= 0) & (token - along < tokens)
        for down in tl.static_range(-PATCH, PATCH + 1):
            line = real & (row - down >= 0) & (row - down < ROWS)
            for right in tl.static_range(-PATCH, PATCH + 1):
                there = line & (column - right >= 0) & (column - right < COLUMNS)
                back = down * COLUMNS + right
                noted = winner + place - (back * gradient_patch + along * gradient_token)
                won = tl.load(noted, mask=there, other=STEPS).to(tl.int32)
                step = ((along + TEXT) * side + down + PATCH) * side + right + PATCH
                hit = there & (won == step)
                offset = back * path_patch + along * path_token
                total += tl.load(above - offset, mask=hit, other=0.0).to(TYPE)
    tl.store(gradient + place, total, mask=inside)
