"""ACE-RPE as pure functions: similarity, anchors, distance, path (paper section 3.2, Eqs 3-8).

Shapes: M = rows * columns image patches without [CLS], N text tokens, G groups, "..." any leading
batch axes. Half precision is computed in float32 and comes back as it went in, float64 stays.
Nothing here detaches: whether gradients pass through a path is the caller's choice (reading A27).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Metric = Literal["euclidean", "manhattan", "chebyshev"]


def group_similarity(image: Tensor, text: Tensor, groups: int) -> Tensor:
    """Multi-group cosine similarity S_G of every patch with every token (Eq. 3, reading A6).

    Channels are cut into `groups` contiguous blocks, each normalised on its own. A block that is
    all zero has similarity 0 and a finite gradient.

    Args:
        image: (..., M, D) patch features.
        text: (..., N, D) token features.
        groups: G.

    Returns:
        (..., M, N, G), each entry in [-1, 1].

    Raises:
        ValueError: the widths differ or G does not divide D.
    """
    width = image.shape[-1]
    if text.shape[-1] != width:
        raise ValueError(f"image features have width {width}, text features {text.shape[-1]}")
    if width % groups:
        raise ValueError(f"{groups} groups do not divide {width} channels")
    dtype = image.dtype
    with torch.autocast(image.device.type, enabled=False):
        patches = _unit(_at_least_float32(image).unflatten(-1, (groups, -1))).transpose(-3, -2)
        tokens = _unit(_at_least_float32(text).unflatten(-1, (groups, -1))).transpose(-3, -2)
        similarity = patches @ tokens.transpose(-2, -1)  # (..., G, M, N)
    return similarity.movedim(-3, -1).to(dtype)


def anchor_distance(similarity: Tensor, threshold: float | Tensor = 0.05) -> Tensor:
    """Distance D_G = 1/S at anchors and +inf elsewhere (Eqs 4-6, hard form, readings A8 and A9).

    Args:
        similarity: (..., M, N, G), from `group_similarity`.
        threshold: delta, positive; a number or a 0-d tensor.

    Returns:
        (..., M, N, G): 1/S where S >= delta, +inf elsewhere.

    Raises:
        ValueError: a threshold that is a number and not positive.
    """
    if not isinstance(threshold, Tensor) and threshold <= 0:
        raise ValueError(f"the anchor threshold must be positive, not {threshold}")
    anchor = similarity >= threshold
    return torch.where(anchor, 1 / torch.where(anchor, similarity, 1.0), math.inf)


def anchor_path(
    distance: Tensor,
    grid: tuple[int, int],
    text_mask: Tensor | None = None,
    text_window: int | None = 5,
    patch_window: int | None = 9,
    metric: Metric = "euclidean",
) -> tuple[Tensor, Tensor]:
    """Shortest anchor path P_ace from every token to every patch (Eq. 7, readings A10-A15).

    The minimum over anchor patch and anchor token splits into two one-sided minima, first over
    the tokens of the window, then over the patches of the window.

    Args:
        distance: (..., M, N, G), from `anchor_distance`.
        grid: (rows, columns) of the patches, M = rows * columns, in raster order.
        text_mask: (..., N) or (B, N) bool, True = a real word; other tokens are neither sources
            nor targets.
        text_window: B_t, an odd number of tokens; None is unbounded.
        patch_window: B_p, an odd square of patches (9 = 3 x 3); None is unbounded.
        metric: distance between patches, in patches.

    Returns:
        The path (..., M, N, G), 0 where nothing is reachable, and the boolean `reachable`.

    Raises:
        ValueError: the grid does not fit M, a window is even or not square, unknown metric.
    """
    rows, columns = grid
    if rows * columns != distance.shape[-3]:
        raise ValueError(
            f"a grid of {rows} x {columns} has {rows * columns} patches, "
            f"the distances have {distance.shape[-3]}"
        )
    if metric not in ("euclidean", "manhattan", "chebyshev"):
        raise ValueError(f"unknown patch metric {metric!r}; one of euclidean, manhattan, chebyshev")
    text_reach = _text_reach(text_window, distance.shape[-2])
    patch_reach = _patch_reach(patch_window, grid)
    dtype = distance.dtype
    distance = _at_least_float32(distance)
    mask = None
    if text_mask is not None:
        mask = _align_mask(text_mask, distance)
        distance = distance.masked_fill(~mask, math.inf)

    near_token = distance
    for offset in range(1, text_reach + 1):
        for shift in (-offset, offset):
            near_token = torch.minimum(near_token, _shift(distance, -2, shift) + offset)

    plane = near_token.unflatten(-3, grid)
    path = plane
    for down in range(-min(patch_reach, rows - 1), min(patch_reach, rows - 1) + 1):
        moved = _shift(plane, -4, down)
        for right in range(-min(patch_reach, columns - 1), min(patch_reach, columns - 1) + 1):
            if down or right:
                step = _patch_distance(down, right, metric)
                path = torch.minimum(path, _shift(moved, -3, right) + step)
    path = path.flatten(-4, -3)
    reachable = torch.isfinite(path)
    if mask is not None:
        reachable = reachable & mask
    return torch.where(reachable, path, 0.0).to(dtype), reachable


def embed_path(path: Tensor, table: Tensor) -> Tensor:
    """E_ace = P W (Eq. 8): (..., M, N, G) with (G, D) -> (..., M, N, D).

    For inspection and as the reference of tests only; the model never builds this tensor.
    """
    return path @ table


def mean_over_words(path: Tensor, word_mask: Tensor) -> Tensor:
    """Mean path of each patch over the words of its text, for Eq. 10 (reading A20).

    Unreachable pairs count as 0; [CLS], [SEP] and padding are not in the divisor.

    Args:
        path: (B, M, N, G), 0 where not reachable.
        word_mask: (B, N) bool, True = a real word.

    Returns:
        (B, M, G); zero for a text without words.
    """
    words = word_mask.sum(-1).clamp(min=1).to(path.dtype)
    return path.sum(-2) / words[:, None, None]


def mean_over_patches(path: Tensor) -> Tensor:
    """Mean path of each token over all patches, for Eq. 10: (B, M, N, G) -> (B, N, G)."""
    return path.mean(-3)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _unit(x: Tensor) -> Tensor:
    """x / |x| along the last axis; zero vectors stay zero with a finite gradient."""
    square = x.square().sum(-1, keepdim=True)
    return x / torch.where(square > 0, square, 1.0).sqrt()


def _text_reach(window: int | None, tokens: int) -> int:
    if window is None:
        return tokens - 1
    if window < 1 or window % 2 == 0:
        raise ValueError(f"text_window must be an odd number of tokens, not {window}")
    return min(window // 2, tokens - 1)


def _patch_reach(window: int | None, grid: tuple[int, int]) -> int:
    if window is None:
        return max(grid) - 1
    side = math.isqrt(window) if window > 0 else 0
    if side * side != window or side % 2 == 0:
        raise ValueError(f"patch_window must be an odd square of patches (1, 9, 25), not {window}")
    return side // 2


def _patch_distance(down: int, right: int, metric: Metric) -> float:
    if metric == "euclidean":
        return math.hypot(down, right)
    if metric == "manhattan":
        return abs(down) + abs(right)
    return max(abs(down), abs(right))


def _align_mask(mask: Tensor, distance: Tensor) -> Tensor:
    """(..., N) or (B, N) to something that broadcasts against (..., M, N, G)."""
    missing = (distance.ndim - 2) - mask.ndim
    for _ in range(missing):
        mask = mask.unsqueeze(-2)
    return mask[..., None, :, None]


def _shift(x: Tensor, axis: int, offset: int) -> Tensor:
    """Entry k holds x[k + offset] along `axis`; +inf where that does not exist."""
    if offset == 0:
        return x
    length = x.shape[axis]
    kept = x.narrow(axis, max(offset, 0), length - abs(offset))
    edge = torch.full_like(x.narrow(axis, 0, abs(offset)), math.inf)
    return torch.cat((kept, edge) if offset > 0 else (edge, kept), axis)
