"""Unbounded one-sided minima of Eq. 7 in time linear in the patches and tokens.

min_i (x_i + |m - i|) is the distance transform of Rosenfeld and Pfaltz (1966): walking along an
axis and back again, each place hears of the best value behind it. Manhattan distance adds the axes
up, so it takes one such walk for each. Under Chebyshev distance the walk over the rows may also
move one column aside at each step (Borgefors, 1986), and what remains lies along the columns.
Euclidean distance has no such form. Lengths are in patches or tokens; everything is
differentiable, and entries may be +inf.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


def along_axis(x: Tensor, dim: int) -> Tensor:
    """Minimum over i of x[i] + |m - i| along one axis, same shape."""
    places = list(x.unbind(dim))
    for place, before in _there_and_back(len(places)):
        places[place] = torch.minimum(places[place], places[before] + 1)
    return torch.stack(places, dim)


def manhattan(x: Tensor) -> Tensor:
    """Minimum over a whole grid under Manhattan distance: (..., rows, columns, N), same shape."""
    return along_axis(along_axis(x, -3), -2)


def chebyshev(x: Tensor) -> Tensor:
    """Minimum over a whole grid under Chebyshev distance: (..., rows, columns, N), same shape."""
    rows = list(x.unbind(-3))
    for row, before in _there_and_back(len(rows)):
        rows[row] = torch.minimum(rows[row], _with_neighbours(rows[before]) + 1)
    return along_axis(torch.stack(rows, -3), -2)


def _there_and_back(length: int) -> list[tuple[int, int]]:
    """(place, the one before it) on a walk to the end of an axis and back."""
    there = [(place, place - 1) for place in range(1, length)]
    return there + [(before, place) for place, before in reversed(there)]


def _with_neighbours(row: Tensor) -> Tensor:
    """Return the least of each column and the two beside it, over (..., columns, N)."""
    columns = row.shape[-2]
    padded = functional.pad(row, (0, 0, 1, 1), value=math.inf)
    sides = torch.minimum(padded.narrow(-2, 0, columns), padded.narrow(-2, 2, columns))
    return torch.minimum(row, sides)
