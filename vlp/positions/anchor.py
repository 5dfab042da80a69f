"""Paths of ACE-RPE as pure functions: similarity, distance, path, means (Eqs 3-7 and 10).

Shapes: M = rows * columns image patches without [CLS], N text tokens, G groups, "..." any leading
batch axes. Results have the input's dtype; half precision is computed in float32. No function
detaches a gradient (papers.md#ace-a27).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from vlp.compilation import on_gpu
from vlp.positions.kernel_operator import KernelOperator
from vlp.positions.options import require_choice
from vlp.precision import at_least_float32


def axis_transform(x: Tensor, dim: int) -> Tensor:
    """Return the distance transform y[m] = min over i of x[i] + |m - i| along one axis."""
    slices = list(x.unbind(dim))
    for index, previous in _sweep(len(slices)):
        slices[index] = torch.minimum(slices[index], slices[previous] + 1)
    return torch.stack(slices, dim)


def chebyshev_transform(x: Tensor) -> Tensor:
    """Return y[m] = min over patches i of x[i] + |m - i|, Chebyshev: (..., rows, columns, N)."""
    rows = list(x.unbind(-3))
    for row, previous in _sweep(len(rows)):
        rows[row] = torch.minimum(rows[row], _minimum_of_three(rows[previous]) + 1)
    return axis_transform(torch.stack(rows, -3), -2)


def _sweep(length: int) -> list[tuple[int, int]]:
    # Pairs (index, previous index) of a pass to the end of an axis and back.
    forth = [(index, index - 1) for index in range(1, length)]
    back = [(index, index + 1) for index in reversed(range(length - 1))]
    return forth + back


def _minimum_of_three(row: Tensor) -> Tensor:
    # Of each column and both its neighbours.
    columns = row.shape[-2]
    padded = functional.pad(row, (0, 0, 1, 1), value=math.inf)
    neighbours = torch.minimum(padded.narrow(-2, 0, columns), padded.narrow(-2, 2, columns))
    return torch.minimum(row, neighbours)


# Distance between patches, D_p2p of Eq. 7 (papers.md#ace-a11).
Metric = Literal["euclidean", "manhattan", "chebyshev"]


def text_window_reach(window: int | None) -> int | None:
    """Return how many tokens a window of B_t tokens extends to either side; None: unbounded."""
    if window is not None and (window < 1 or window % 2 == 0):
        raise ValueError(f"text_window must be an odd number of tokens, not {window}")
    return None if window is None else window // 2


def patch_window_reach(window: int | None) -> int | None:
    """Return how many patches a square window of B_p extends to each side; None: unbounded."""
    if window is None:
        return None
    side = math.isqrt(window) if window > 0 else 0
    if side * side != window or side % 2 == 0:
        raise ValueError(f"patch_window must be an odd square of patches (1, 9, 25), not {window}")
    return side // 2


# Path entries (patch, token, group) that one program of the kernel computes.
_BLOCK = 256
# The kernel unrolls the loop over a window's patches: larger windows take too long to compile.
_MAX_PATCH_REACH = 4


def kernel_supports(text_reach: int, patch_reach: int) -> bool:
    """Return whether the kernel supports a window: at most 9 x 9 patches and 2^15 - 1 entries."""
    # The kernel numbers the entries of a window in int16.
    return patch_reach <= _MAX_PATCH_REACH and _window_entries(text_reach, patch_reach) < 2**15


def windowed_path(
    distance: Tensor,
    grid: tuple[int, int],
    word_mask: Tensor | None,
    text_reach: int,
    patch_reach: int,
    metric: Metric,
) -> tuple[Tensor, Tensor]:
    """Run the kernel of `anchor_path`, differentiable once: path and `reachable` (B, M, N, G).

    `distance` is (B, M, N, G) with any strides, `word_mask` (B, N) bool.
    """
    save_winner = distance.requires_grad and torch.is_grad_enabled()
    # An operator's schema has no tuples: one list holds all sizes.
    sizes = [*grid, text_reach, patch_reach]
    path, reachable, _ = _path_operator(distance, word_mask, sizes, metric, save_winner)
    return path, reachable


@functools.cache
def kernels() -> ModuleType:
    """Import the module of Triton kernels."""
    # Not at the top, as Triton takes long to import and a CPU never needs it.
    return importlib.import_module("vlp.positions.anchor_kernels")


def _launch_forward(
    distance: Tensor, word_mask: Tensor | None, sizes: list[int], metric: str, save_winner: bool
) -> tuple[Tensor, Tensor, Tensor]:
    path, reachable, winner = _empty_results(distance, word_mask, sizes, metric, save_winner)
    reachable_bytes = reachable.view(torch.uint8)
    if path.numel():
        with torch.cuda.device(path.get_device()):
            # `reachable_bytes` stands in for tensors that the kernel does not use.
            kernels().path_forward_kernel[_launch_grid(path)](
                distance,
                reachable_bytes if word_mask is None else word_mask.contiguous().view(torch.uint8),
                path,
                reachable_bytes,
                winner if save_winner else reachable_bytes,
                *distance.stride(),
                *path.stride(),
                **_kernel_options(path, sizes, metric),
                MASKED=word_mask is not None,
                SAVE_WINNER=save_winner,
            )
    return path, reachable, winner


def _empty_results(
    distance: Tensor, word_mask: Tensor | None, sizes: list[int], metric: str, save_winner: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate path, `reachable`, and `winner`: the window entry of each path's anchor."""
    # With the strides of `distance`, so that the kernel reads and writes in one memory order.
    path = torch.empty_like(distance)
    reachable = torch.empty_like(path, dtype=torch.bool)
    # The entries of a default window (45) can be numbered in one byte.
    dtype = torch.uint8 if _window_entries(*sizes[2:]) < 256 else torch.int16
    return path, reachable, torch.empty_like(path if save_winner else path[:0], dtype=dtype)


def _launch_backward(path_grad: Tensor, winner: Tensor, sizes: list[int], metric: str) -> Tensor:
    distance_grad = torch.empty_like(winner, dtype=path_grad.dtype)
    if distance_grad.numel():
        with torch.cuda.device(distance_grad.get_device()):
            kernels().path_backward_kernel[_launch_grid(distance_grad)](
                path_grad,
                winner,
                distance_grad,
                *path_grad.stride(),
                *distance_grad.stride(),
                **_kernel_options(distance_grad, sizes, metric),
            )
    return distance_grad


def _empty_gradient(path_grad: Tensor, winner: Tensor, sizes: list[int], metric: str) -> Tensor:
    return torch.empty_like(winner, dtype=path_grad.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, ctx.sizes, ctx.metric, _ = inputs
    _, reachable, winner = output
    ctx.save_for_backward(winner)
    ctx.mark_non_differentiable(reachable, winner)


def _backward(ctx: Any, path_grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    (winner,) = ctx.saved_tensors
    distance_grad = _backward_operator(path_grad, winner, ctx.sizes, ctx.metric)
    return distance_grad, None, None, None, None


_path_operator = KernelOperator(
    "windowed_path", _launch_forward, _empty_results, _setup_context, _backward
)
_backward_operator = KernelOperator("windowed_path_backward", _launch_backward, _empty_gradient)


def _kernel_options(path: Tensor, sizes: list[int], metric: str) -> dict[str, Any]:
    rows, columns, text_reach, patch_reach = sizes
    language = importlib.import_module("triton.language")
    return {
        "tokens": path.shape[2],
        "groups": path.shape[3],
        "ROWS": rows,
        "COLUMNS": columns,
        "TEXT_REACH": text_reach,
        "PATCH_REACH": patch_reach,
        "METRIC": metric,
        "ENTRIES": _window_entries(text_reach, patch_reach),
        "GROUPS_LAST": path.stride(3) == 1,
        "DTYPE": getattr(language, "float64" if path.dtype == torch.float64 else "float32"),
        "BLOCK": _BLOCK,
    }


def _window_entries(text_reach: int, patch_reach: int) -> int:
    """Return the number of (token, patch) entries of a window."""
    return (2 * text_reach + 1) * (2 * patch_reach + 1) ** 2


def _launch_grid(x: Tensor) -> tuple[int]:
    """Return Triton's launch grid: blocks of one pair's entries, times pairs."""
    return (len(x) * -(-x[0].numel() // _BLOCK),)


# Numbers of an intermediate result that stay in a core's cache: 1 MiB of float32.
_CACHED_NUMBERS = 1 << 18
# At import, as `torch.compile` cannot trace `find_spec` (PyTorch 2.11).
HAS_TRITON = importlib.util.find_spec("triton") is not None


def group_similarity(image: Tensor, text: Tensor, groups: int) -> Tensor:
    """Compute the cosine S of every patch and token in each group (Eq. 3, papers.md#ace-a6).

    Args:
        image: (..., M, D) patch features.
        text: (..., N, D) token features.
        groups: G, the number of contiguous blocks of channels.

    Returns:
        (..., M, N, G) in the dtype of `image`, in [-1, 1]; 0 where a block of features is zero.
    """
    width = image.shape[-1]
    if text.shape[-1] != width:
        raise ValueError(f"image features have width {width}, text features {text.shape[-1]}")
    if width % groups:
        raise ValueError(f"{groups} groups do not divide {width} channels")
    dtype = image.dtype
    # Autocast would compute in bfloat16, which is too coarse for a threshold.
    with torch.autocast(image.device.type, enabled=False):
        patches = _unit(at_least_float32(image).unflatten(-1, (groups, -1))).transpose(-3, -2)
        tokens = _unit(at_least_float32(text).unflatten(-1, (groups, -1))).transpose(-3, -2)
        similarity = patches @ tokens.transpose(-2, -1)  # (..., G, M, N)
    return similarity.movedim(-3, -1).to(dtype)


def anchor_distance(
    similarity: Tensor, threshold: float | Tensor = 0.05, hard: bool = True, tau: float = 1e4
) -> Tensor:
    """Compute D_G = 1 / S_hat of patches and tokens (Eqs 4-6, papers.md#ace-a8 and #ace-a9).

    An anchor is an entry with S >= delta; its distance is 1 / S. The hard form, the limit of Eq. 4
    for tau -> infinity, sets all other entries to +inf. The soft form, Eq. 4 as printed, sets them
    to exp(tau (delta - S)) / delta. With default arguments, here and in `anchor_path`, both forms
    give equal paths unless some S lies within 1.6e-5 below delta (papers.md#ace-soft-hard).

    Args:
        similarity: (..., M, N, G), from `group_similarity`.
        threshold: delta, a positive number or 0-d tensor.
        hard: False selects the soft form, in which `anchor_path` reaches every patch and word.
        tau: steepness of the soft form, positive; the hard form ignores it.

    Returns:
        (..., M, N, G): at anchors in [1, 1/delta], elsewhere larger or +inf.
    """
    # Checking a tensor would synchronise a GPU.
    if not isinstance(threshold, Tensor) and not threshold > 0:
        raise ValueError(f"the anchor threshold must be positive, not {threshold}")
    if not tau > 0:
        raise ValueError(f"tau must be positive, not {tau}")
    dtype = similarity.dtype
    similarity = at_least_float32(similarity)
    is_anchor = similarity >= threshold
    # Clamped, as 1/0 under a `where` would make the gradient NaN.
    divisor = similarity.clamp(min=threshold)
    if hard and _may_overwrite(divisor):
        return divisor.reciprocal_().masked_fill_(~is_anchor, math.inf).to(dtype)
    distance = divisor.reciprocal()
    if hard:
        return distance.masked_fill(~is_anchor, math.inf).to(dtype)
    # Not as 1 / S_hat, as S_hat underflows in float32 from 0.0102 below the threshold. The exponent
    # is clamped, so that sums of distances stay finite.
    max_exponent = math.log(torch.finfo(dtype).max) / 2
    exponent = (tau * (threshold - similarity)).clamp(0.0, max_exponent)
    return torch.where(is_anchor, distance, exponent.exp() / threshold).to(dtype)


def anchor_path(
    distance: Tensor,
    grid: tuple[int, int],
    text_mask: Tensor | None = None,
    text_window: int | None = 5,
    patch_window: int | None = 9,
    metric: Metric = "euclidean",
) -> tuple[Tensor, Tensor]:
    """Compute the shortest path P_ace of Eq. 7 (papers.md#ace-a10 to #ace-a16).

    With Triton on a GPU, windows that `kernel_supports` run in a kernel. Where several anchors are
    equally near, PyTorch divides the gradient among them and the kernel gives it to one.

    Args:
        distance: (..., M, N, G), from `anchor_distance`.
        grid: (rows, columns) of the patches, M = rows * columns, in raster order.
        text_mask: (..., N) or (B, N) bool, True = a word piece (a word mask, not an attention
            mask); other tokens are no anchors and have no path.
        text_window: B_t, an odd number of tokens; None is unbounded.
        patch_window: B_p, an odd square of patches (9 = 3 x 3); None is unbounded.
        metric: distance between patches, in patches.

    Returns:
        The path (..., M, N, G), where a step of one patch and a step of one token both add 1
        (papers.md#ace-a16), and `reachable`, bool of the same shape. Where all distances in the
        windows are +inf (hard form: no anchor), they are 0 and False.
    """
    rows, columns = grid
    if rows * columns != distance.shape[-3]:
        raise ValueError(
            f"a grid of {rows} x {columns} has {rows * columns} patches, "
            f"the distances have {distance.shape[-3]}"
        )
    require_choice("patch metric", metric, get_args(Metric))
    text_reach, patch_reach = text_window_reach(text_window), patch_window_reach(patch_window)
    shape, dtype = distance.shape, distance.dtype
    word_mask = None if text_mask is None else _expand_mask(text_mask, distance)
    distance = distance.reshape(math.prod(shape[:-3]), *shape[-3:])
    if (
        text_reach is not None
        and patch_reach is not None
        and kernel_supports(text_reach, patch_reach)
        and on_gpu(distance)
        and HAS_TRITON
    ):
        path, reachable = windowed_path(distance, grid, word_mask, text_reach, patch_reach, metric)
        return path.view(shape), reachable.view(shape)

    # (B, G, rows, columns, N): tokens are contiguous in memory, as `group_similarity` leaves them.
    distance = at_least_float32(distance).movedim(-1, 1).unflatten(2, grid)
    windows = text_reach, patch_reach, metric
    if _may_overwrite(distance):
        # A chunk of pairs at a time, so that intermediate results stay in a CPU's cache.
        path, reachable = torch.empty_like(distance), torch.empty_like(distance, dtype=torch.bool)
        chunk_size = _pairs_in_cache(distance)
        for start in range(0, len(distance), chunk_size):
            chunk = slice(start, start + chunk_size)
            chunk_mask = None if word_mask is None else word_mask[chunk]
            shortest = _shortest_path(distance[chunk], chunk_mask, *windows)
            torch.lt(shortest, math.inf, out=reachable[chunk])
            # NaN of a diverged run counts as unreachable. It spreads over its window; the kernel
            # leaves out only the entry itself.
            torch.nan_to_num(shortest, nan=0.0, posinf=0.0, out=path[chunk])
    else:
        shortest = _shortest_path(distance, word_mask, *windows)
        path, reachable = torch.nan_to_num(shortest, nan=0.0, posinf=0.0), shortest < math.inf
    path, reachable = (x.flatten(2, 3).movedim(1, -1).view(shape) for x in (path, reachable))
    return path.to(dtype), reachable


def longest_path(
    threshold: float | Tensor,
    grid: tuple[int, int],
    tokens: int,
    text_window: int | None = 5,
    patch_window: int | None = 9,
    metric: Metric = "euclidean",
) -> float | Tensor:
    """Return the largest value of a path from a hard anchor, Eq. 7 (papers.md#ace-a15).

    Args:
        threshold: delta of Eq. 4, positive; a number or a 0-d tensor.
        grid: (rows, columns) of the patches.
        tokens: N, the number of text tokens.
        text_window, patch_window, metric: see `anchor_path`.
    """
    text_reach, patch_reach = text_window_reach(text_window), patch_window_reach(patch_window)
    text_reach = tokens - 1 if text_reach is None else text_reach
    down, right = (size - 1 if patch_reach is None else patch_reach for size in grid)
    return 1 / threshold + text_reach + _patch_distance(down, right, metric)


def mean_over_words(path: Tensor, word_mask: Tensor) -> Tensor:
    """Average paths over the words of a text, for Eq. 10 (papers.md#ace-a20): (B, M, G).

    [CLS], [SEP] and padding do not count. A text without words has 0.

    Args:
        path: (B, M, N, G), 0 for tokens that are no words.
        word_mask: (B, N) bool, True = word piece.
    """
    word_count = word_mask.sum(-1).clamp(min=1).to(path.dtype)
    return path.sum(-2) / word_count[:, None, None]


def mean_over_patches(path: Tensor) -> Tensor:
    """Average paths (..., M, N, G) over M for Eq. 10 (papers.md#ace-a20): (..., N, G)."""
    return path.mean(-3)


def _unit(x: Tensor) -> Tensor:
    # Not x / |x|: zero vectors stay zero, with a finite gradient.
    square = x.square().sum(-1, keepdim=True)
    return x / torch.where(square > 0, square, 1.0).sqrt()


def _patch_distance(down: int, right: int, metric: Metric) -> float:
    if metric == "euclidean":
        return math.hypot(down, right)
    if metric == "manhattan":
        return abs(down) + abs(right)
    return max(abs(down), abs(right))


def _expand_mask(mask: Tensor, distance: Tensor) -> Tensor:
    """Expand a mask (..., N) or (B, N) for distances (..., M, N, G) to (pairs, N)."""
    batch_shape, tokens = distance.shape[:-3], distance.shape[-2]
    for _ in range(len(batch_shape) + 1 - mask.ndim):
        mask = mask.unsqueeze(-2)
    return mask.expand(*batch_shape, tokens).reshape(math.prod(batch_shape), tokens)


def _token_penalty(word_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 at words and +inf elsewhere, (B, 1, 1, 1, N)."""
    # Adding it to distances is cheaper than `masked_fill`.
    penalty = torch.zeros(word_mask.shape, dtype=dtype, device=word_mask.device)
    return penalty.masked_fill_(~word_mask, math.inf)[:, None, None, None]


def _may_overwrite(x: Tensor) -> bool:
    # Autograd and the compiler need intermediate results unchanged.
    return not (x.requires_grad or torch.compiler.is_compiling())


def _pairs_in_cache(distance: Tensor) -> int:
    """Return how many pairs of (B, G, rows, columns, N) a CPU's caches hold; all on a GPU."""
    if distance.device.type != "cpu":
        return max(1, len(distance))
    numbers_per_pair = max(1, distance[:1].numel())
    return max(1, _CACHED_NUMBERS * torch.get_num_threads() // numbers_per_pair)


def _shortest_path(
    distance: Tensor,
    word_mask: Tensor | None,
    text_reach: int | None,
    patch_reach: int | None,
    metric: Metric,
) -> Tensor:
    """Compute Eq. 7 over (B, G, rows, columns, N): +inf where no anchor is reachable."""
    # The minimum over anchors splits into minima over tokens and then over patches. Unbounded
    # windows take time linear in M and N, except under the Euclidean metric.
    penalty = None if word_mask is None else _token_penalty(word_mask, distance.dtype)
    path = distance if penalty is None else distance + penalty
    if text_reach is None:
        path = axis_transform(path, -1)
    else:
        path = _relax(path, _token_steps(path, text_reach))
    # Tokens that are no words have no path, but the minimum over tokens gave them one.
    path = path if penalty is None else path + penalty
    if patch_reach is None and metric == "manhattan":
        return axis_transform(axis_transform(path, -3), -2)
    if patch_reach is None and metric == "chebyshev":
        return chebyshev_transform(path)
    reach = max(path.shape[-3:-1]) if patch_reach is None else patch_reach
    return _relax(path, _patch_steps(path, reach, metric))


def _token_steps(path: Tensor, reach: int) -> Iterator[tuple[Tensor, float]]:
    """Yield, for each step, the minimum over the tokens `step` before and after, and the step."""
    for step in range(1, min(reach, path.shape[-1] - 1) + 1):
        yield _neighbour_minimum(path, -1, step), step


def _patch_steps(path: Tensor, reach: int, metric: Metric) -> Iterator[tuple[Tensor, float]]:
    """Yield, for each step, the minimum over the patches at (± down, ± right), and its length."""
    # The neighbours above and below are reduced first: a window of side 2 r + 1 takes only
    # (r + 1)^2 - 1 steps.
    rows, columns = path.shape[-3:-1]
    for down in range(min(reach, rows - 1) + 1):
        vertical = _neighbour_minimum(path, -3, down) if down else path
        for right in range(1, min(reach, columns - 1) + 1):
            yield _neighbour_minimum(vertical, -2, right), _patch_distance(down, right, metric)
        if down:
            # Last, as `_relax` may overwrite `vertical`.
            yield vertical, _patch_distance(down, 0, metric)


def _relax(path: Tensor, steps: Iterable[tuple[Tensor, float]]) -> Tensor:
    """Return the elementwise minimum of `path` and of x + length for all (x, length) of `steps`."""
    shortest = path
    for step_path, length in steps:
        if _may_overwrite(step_path):
            shortest = torch.minimum(shortest, step_path.add_(length), out=step_path)
        else:
            shortest = torch.minimum(shortest, step_path + length)
    return shortest


def _neighbour_minimum(x: Tensor, dim: int, step: int) -> Tensor:
    """Return min(x[k - step], x[k + step]) along one axis, +inf beyond it; always a new tensor."""
    size = x.shape[dim]
    if not _may_overwrite(x):
        padded = functional.pad(x, [0, 0] * (-dim - 1) + [step, step], value=math.inf)
        return torch.minimum(padded.narrow(dim, 0, size), padded.narrow(dim, 2 * step, size))
    # At either end `outer` positions have one neighbour. The positions between them have two, or,
    # if the step is more than half the size, none.
    outer = min(step, size - step)
    inner = size - 2 * outer
    minimum = torch.empty_like(x)
    minimum.narrow(dim, 0, outer).copy_(x.narrow(dim, step, outer))
    minimum.narrow(dim, size - outer, outer).copy_(x.narrow(dim, size - outer - step, outer))
    middle = minimum.narrow(dim, outer, inner)
    if outer == step:
        torch.minimum(x.narrow(dim, 0, inner), x.narrow(dim, 2 * step, inner), out=middle)
    else:
        middle.fill_(math.inf)
    return minimum
