"""ACE-RPE as pure functions: similarity, anchors, distance, path (paper section 3.2, Eqs 3-8).

Shapes: M = rows * columns image patches without [CLS], N text tokens, G groups, "..." any leading
batch axes. Half precision is computed in float32 and comes back as it went in, float64 stays.
Nothing here detaches: whether gradients pass through a path is the caller's choice (reading A27).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from vlp.positions import distance_transform

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
    the tokens of the window, then over the patches of the window. Unbounded ones take time linear
    in M and N, but for Euclidean distance, which compares every patch with every other.

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
    text_reach = _text_reach(text_window)
    patch_reach = _patch_reach(patch_window)
    dtype = distance.dtype
    distance = _at_least_float32(distance)
    mask = None
    if text_mask is not None:
        mask = _align_mask(text_mask, distance)
        distance = distance.masked_fill(~mask, math.inf)

    # Groups first: tokens then lie side by side in memory, as `group_similarity` leaves them.
    plane = distance.movedim(-1, -3).unflatten(-2, grid)  # (..., G, rows, columns, N)
    plane = _over_tokens(plane, text_reach)
    plane = _over_patches(plane, patch_reach, metric)
    path = plane.flatten(-3, -2).movedim(-3, -1)
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


def _text_reach(window: int | None) -> int | None:
    if window is not None and (window < 1 or window % 2 == 0):
        raise ValueError(f"text_window must be an odd number of tokens, not {window}")
    return None if window is None else window // 2


def _patch_reach(window: int | None) -> int | None:
    if window is None:
        return None
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


def _over_tokens(plane: Tensor, reach: int | None) -> Tensor:
    """First one-sided minimum, over (..., rows, columns, N)."""
    if reach is None:
        return distance_transform.along_axis(plane, -1)
    reach = min(reach, plane.shape[-1] - 1)
    return _nearest(plane, [(abs(shift), (0, 0, shift)) for shift in range(-reach, reach + 1)])


def _over_patches(plane: Tensor, reach: int | None, metric: Metric) -> Tensor:
    """Second one-sided minimum, over (..., rows, columns, N)."""
    rows, columns = plane.shape[-3:-1]
    if reach is None:
        if metric == "manhattan":
            return distance_transform.manhattan(plane)
        if metric == "chebyshev":
            return distance_transform.chebyshev(plane)
        reach = max(rows, columns)
    down, right = min(reach, rows - 1), min(reach, columns - 1)
    steps = [
        (_patch_distance(row, column, metric), (row, column, 0))
        for row in range(-down, down + 1)
        for column in range(-right, right + 1)
    ]
    return _nearest(plane, steps)


def _nearest(x: Tensor, steps: Sequence[tuple[float, tuple[int, int, int]]]) -> Tensor:
    """Minimum over steps of x[k + offset] + length, over the last three axes.

    Steps of one length share one addition, and the border is padded with +inf once, so a step
    costs one pass over the data.
    """
    reach = [max(abs(offset[axis]) for _, offset in steps) for axis in range(3)]
    if not any(reach):
        return x
    sizes = x.shape[-3:]
    padding = [side for axis in (2, 1, 0) for side in (reach[axis], reach[axis])]
    padded = functional.pad(x, padding, value=math.inf)
    nearest = x
    for length in sorted({length for length, _ in steps}):
        moved = padded + length
        for _, offset in (step for step in steps if step[0] == length and any(step[1])):
            window = moved
            for axis in range(3):
                window = window.narrow(axis - 3, reach[axis] + offset[axis], sizes[axis])
            nearest = torch.minimum(nearest, window)
    return nearest
