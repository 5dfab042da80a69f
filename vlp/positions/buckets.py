"""Buckets of relative positions: iRPE's index functions and its four mapping methods.

A bucket is a row of a table, shared by all pairs of tokens with offsets that map to it. (alpha,
beta, gamma) = ratio * (1, 2, 8) (section 4.1). Indices are computed in float64, so that Eq. 18
rounds the same on every device.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from vlp.positions.coordinates import require_patches
from vlp.positions.options import require_choice

Method = Literal["euclidean", "quantization", "cross", "product"]
IndexFunction = Literal["piecewise", "clip"]
Variant = Literal["rank", "squared"]
Universe = Literal["grid", "global"]


def piecewise_index(x: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    """Compute g(x), linear, then logarithmic (iRPE Eq. 18, papers.md#irpe-i1, #irpe-i2).

    The result is int64 in [-int(beta), int(beta)].

    Args:
        x: signed distances in patches, any shape and dtype.
        alpha: the distance at which the logarithm begins.
        beta: the largest index.
        gamma: the distance at which the logarithm reaches beta.
    """
    if not 0 < alpha < beta or gamma <= alpha:
        raise ValueError(
            f"the piecewise index needs 0 < alpha < beta and gamma > alpha, "
            f"not alpha {alpha}, beta {beta}, gamma {gamma}"
        )
    x = x.double()
    distance = x.abs()
    slope = (beta - alpha) / math.log(gamma / alpha)
    logarithmic = alpha + slope * (distance / alpha).log()
    # `round` is half to even; beta is truncated.
    index = torch.where(distance <= alpha, distance, logarithmic).round().clamp(max=int(beta))
    return (x.sign() * index).long()


def clip_index(x: Tensor, beta: float) -> Tensor:
    """Return h(x) = max(-int(beta), min(int(beta), round(x))) (iRPE Eq. 9, papers.md#irpe-i3).

    `x` holds signed distances in patches; the result is int64.
    """
    if beta < 0:
        raise ValueError(f"beta must not be negative, not {beta}")
    return x.double().round().clamp(-int(beta), int(beta)).long()


def table_size(method: Method, ratio: float = 1.9, prefix_tokens: int = 0) -> int:
    """Return the rows of one table; cross has two tables, rows and columns (papers.md#irpe-i7)."""
    require_choice("bucket method", method, get_args(Method))
    if not 0 < ratio < math.inf:
        raise ValueError(f"the bucket ratio must be positive, not {ratio}")
    if prefix_tokens < 0:
        raise ValueError(f"prefix_tokens must not be negative, not {prefix_tokens}")
    # beta is 2 ratio. A prefix has a row of its own (papers.md#irpe-i10).
    side = 2 * int(2 * ratio) + 1
    return (side * side if method == "product" else side) + (prefix_tokens > 0)


def bucket_ids(
    method: Method,
    height: int,
    width: int,
    ratio: float = 1.9,
    function: IndexFunction = "piecewise",
    prefix_tokens: int = 0,
    *,
    pre_round: bool = False,
    variant: Variant = "rank",
    universe: Universe = "grid",
) -> tuple[Tensor, int]:
    """Return the bucket of every pair of tokens (iRPE Eqs 19-25, papers.md#irpe-i4 to #irpe-i10).

    Offsets are query minus key. Euclidean and quantization use only the upper half of their table,
    as distances are not negative.

    Args:
        method: euclidean, quantization, cross or product.
        ratio: (alpha, beta, gamma) = ratio * (1, 2, 8).
        function: piecewise (Eq. 18) or clip (Eq. 9).
        prefix_tokens: tokens without a position before the patches; their pairs have the last id.
        pre_round: euclidean only; round the distance before the index function, as the authors'
            code does (papers.md#irpe-i4).
        variant: quantization only; `rank` of the distance (Eq. 21), or the `squared` distance as in
            the authors' code (papers.md#irpe-i5).
        universe: quantization by rank only; rank among the distances of this `grid`, or among those
            of an unbounded grid (`global`, papers.md#irpe-i6).

    Returns:
        ids: int64 from 0 on, (T, T) with T = prefix + height * width, for cross (2, T, T), rows
            then columns.
        size: number of rows of a table.
    """
    size = table_size(method, ratio, prefix_tokens)
    require_choice("bucket function", function, get_args(IndexFunction))
    require_choice("bucket variant", variant, get_args(Variant))
    require_choice("bucket universe", universe, get_args(Universe))
    require_patches(method, (height, width))
    index = partial(clip_index, beta=2 * ratio)
    if function == "piecewise":
        index = partial(piecewise_index, alpha=ratio, beta=2 * ratio, gamma=8 * ratio)

    # A bucket depends on the offset alone: compute it for all offsets, then index by pair.
    cpu = torch.device("cpu")
    down = torch.arange(1 - height, height, device=cpu)[:, None].expand(-1, 2 * width - 1)
    right = torch.arange(1 - width, width, device=cpu).expand(2 * height - 1, -1)
    squared = down.square() + right.square()
    # The id of an index g is g + int(beta), in every method and on each axis (papers.md#irpe-i8);
    # product numbers pairs of both axes' ids (papers.md#irpe-i9).
    shift = int(2 * ratio)
    if method == "euclidean":
        distance = squared.double().sqrt()
        by_offset = index(distance.round() if pre_round else distance) + shift
    elif method == "quantization":
        by_offset = index(squared if variant == "squared" else _rank(squared, universe)) + shift
    elif method == "cross":
        by_offset = torch.stack([index(down), index(right)]) + shift
    else:
        by_offset = (index(down) + shift) * (2 * shift + 1) + index(right) + shift

    patch = torch.arange(height * width, device=cpu)
    row, column = patch // width, patch % width
    # Indices of the offsets, which start at 1 - height and 1 - width.
    down_index = row[:, None] - row + height - 1
    right_index = column[:, None] - column + width - 1
    ids = by_offset[..., down_index, right_index]
    return functional.pad(ids, (prefix_tokens, 0, prefix_tokens, 0), value=size - 1), size


def _rank(squared: Tensor, universe: Universe) -> Tensor:
    """Rank squared distances from 0, among the distances of this grid or of an unbounded grid."""
    all_squared = squared
    if universe == "global":
        offsets = torch.arange(math.isqrt(int(squared.max())) + 1, device=squared.device)
        all_squared = offsets[:, None].square() + offsets.square()
    return torch.searchsorted(all_squared.unique(), squared.contiguous())
