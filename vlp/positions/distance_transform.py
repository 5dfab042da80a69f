"""Unbounded one-sided minima of Eq. 7 in time linear in the patches and tokens.

min_i (x_i + |m - i|) is the distance transform of Rosenfeld and Pfaltz (1966): each place hears of
the best value on its left and on its right, and both are running minima. Manhattan distance adds
the axes up, so it takes one such pass for each; Chebyshev distance is half the Manhattan distance
of coordinates turned by 45 degrees. Euclidean distance has no such form.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def along_axis(x: Tensor, dim: int, step: float = 1.0) -> Tensor:
    """min over i of x[i] + step * |m - i| along one axis; entries may be +inf. Differentiable."""
    length = x.shape[dim]
    places = torch.arange(length, device=x.device, dtype=x.dtype) - (length - 1) / 2
    shape = [1] * x.ndim
    shape[dim] = length
    ramp = (step * places).view(shape)
    before = torch.cummin(x - ramp, dim).values + ramp
    after = torch.cummin((x + ramp).flip(dim), dim).values.flip(dim) - ramp
    return torch.minimum(before, after)


def manhattan(x: Tensor) -> Tensor:
    """Minimum over a whole grid under Manhattan distance: (..., rows, columns, N), same shape."""
    return along_axis(along_axis(x, -3), -2)


def chebyshev(x: Tensor) -> Tensor:
    """Minimum over a whole grid under Chebyshev distance: (..., rows, columns, N), same shape.

    With u = row + column and v = row - column, max(|dr|, |dc|) = (|du| + |dv|) / 2. The turned
    grid has (rows + columns - 1)^2 places, of which those without a patch start at +inf.
    """
    rows, columns = x.shape[-3:-1]
    row = torch.arange(rows, device=x.device)[:, None]
    column = torch.arange(columns, device=x.device)
    u, v = row + column, row - column + columns - 1
    side = rows + columns - 1
    turned = x.new_full((*x.shape[:-3], side, side, x.shape[-1]), math.inf)
    turned[..., u, v, :] = x
    nearest = along_axis(along_axis(turned, -3, 0.5), -2, 0.5)
    return nearest[..., u, v, :]
