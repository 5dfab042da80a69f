"""Rules of some ARC tasks, so that there are as many new pairs of them as training asks for.

Each rule is the answer to every pair that the task gives, test pairs too, which the tests check,
and a way to draw grids like the given ones. What a rule allows to be changed is its symmetry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import ndimage

from vlp.data.vision.arc.grid_variants import TURNS, Symmetry
from vlp.data.vision.arc.tasks import COLOURS, Grid

EVERY_TURN = tuple(TURNS)
MIRRORS = ("identity", "half", "left-right", "top-bottom")
EVERY_COLOUR = tuple(range(COLOURS))


class Rule(NamedTuple):
    """A task's rule.

    largest: rows and columns of the largest grid that is drawn. draw(rng, side): a grid to be
    answered, of at most `side` rows and columns; its answer is not larger. answer(grid): what is
    asked for. symmetry: changes of both that the rule stays the same under.
    """

    largest: int
    draw: Callable[[np.random.Generator, int], Grid]
    answer: Callable[[Grid], Grid]
    symmetry: Symmetry


def _symmetry(turns: tuple[str, ...], colours: tuple[int, ...]) -> Symmetry:
    return Symmetry.model_validate({"turns": turns, "colours": colours})


def _colourful(
    smallest: int, largest: int, colours: tuple[int, ...] = EVERY_COLOUR
) -> Callable[[np.random.Generator, int], Grid]:
    """Squares of a few colours at random."""

    def draw(rng: np.random.Generator, side: int) -> Grid:
        size = int(rng.integers(smallest, min(largest, side) + 1))
        kinds = rng.choice(colours, int(rng.integers(2, len(colours) + 1)), replace=False)
        return rng.choice(kinds, (size, size))

    return draw


def _narrow(rng: np.random.Generator, side: int) -> Grid:
    """A few colours in a grid so narrow that it fits twice beside itself."""
    rows, columns = (int(rng.integers(3, limit + 1)) for limit in (min(side, 5), min(side // 2, 4)))
    kinds = rng.choice(COLOURS, int(rng.integers(2, 7)), replace=False)
    return rng.choice(kinds, (rows, columns))


def _blocks(rng: np.random.Generator, side: int) -> Grid:
    """Cells of colour 3 in groups of all sizes."""
    rows, columns = rng.integers(3, min(side, 6) + 1, 2).tolist()
    return 3 * (rng.random((rows, columns)) < rng.uniform(0.3, 0.6)).astype(np.int64)


def _upper(rng: np.random.Generator, side: int) -> Grid:
    """3 x 3, colours 1 or 2 on black, nothing in the lowest row."""
    grid = int(rng.integers(1, 3)) * (rng.random((3, 3)) < 0.5).astype(np.int64)
    grid[2] = 0
    grid[int(rng.integers(2)), int(rng.integers(3))] = 1
    return grid


def _one_object(rng: np.random.Generator, side: int) -> Grid:
    """One object of one colour, grown cell by cell, somewhere on black."""
    rows, columns = rng.integers(6, min(side, 12) + 1, 2).tolist()
    grid = np.zeros((rows, columns), dtype=np.int64)
    colour = int(rng.integers(1, COLOURS))
    # A window bounds the object, as the given ones span at most 6 cells.
    height, width = (int(rng.integers(2, min(limit, 6) + 1)) for limit in (rows, columns))
    window = grid[int(rng.integers(rows - height + 1)) :, int(rng.integers(columns - width + 1)) :]
    window = window[:height, :width]
    window[int(rng.integers(height)), int(rng.integers(width))] = colour
    for _ in range(int(rng.integers(3, height * width + 1))):
        around = ndimage.binary_dilation(window > 0) & (window == 0)
        free = np.argwhere(around)
        if len(free):
            window[tuple(free[int(rng.integers(len(free)))])] = colour
    return grid


def _loops(rng: np.random.Generator, side: int) -> Grid:
    """Green outlines, some of them closed, and stray green cells."""
    size = int(rng.integers(6, min(side, 20) + 1))
    grid = np.zeros((size, size), dtype=np.int64)
    for _ in range(int(rng.integers(1, 2 + size // 4))):
        height, width = (int(rng.integers(3, min(size, 8) + 1)) for _ in range(2))
        top, left = (int(rng.integers(size - extent + 1)) for extent in (height, width))
        outline = np.ones((height, width), dtype=bool)
        outline[1:-1, 1:-1] = False
        # Corners are not needed to close a loop: what is enclosed spreads along rows and columns.
        outline[[0, 0, -1, -1], [0, -1, 0, -1]] = rng.random(4) < 0.5
        if rng.random() < 0.4:
            gap = np.argwhere(outline)
            outline[tuple(gap[int(rng.integers(len(gap)))])] = False
        grid[top : top + height, left : left + width][outline] = 3
    grid[rng.random((size, size)) < 0.03] = 3
    return grid


def _exchange(first: int, second: int) -> Callable[[Grid], Grid]:
    table = np.arange(COLOURS)
    table[[first, second]] = second, first
    return lambda grid: table[grid]


def _fill_enclosed(grid: Grid) -> Grid:
    """Black cells from which no path of black cells leads to the border become 4."""
    black, _ = ndimage.label(grid == 0)
    border = np.concatenate([black[0], black[-1], black[:, 0], black[:, -1]])
    return np.where((grid == 0) & ~np.isin(black, border), 4, grid)


def _recolour_large(grid: Grid) -> Grid:
    """Groups of three and more cells of colour 3 become 8."""
    groups, _ = ndimage.label(grid == 3)
    sizes = np.bincount(groups.flatten())
    return np.where((groups > 0) & (sizes[groups] >= 3), 8, grid)


def _crop(grid: Grid) -> Grid:
    """Return the box around all that is not black."""
    (found,) = ndimage.find_objects((grid != 0).astype(np.int64))
    return grid[found]


RULES: dict[str, Rule] = {
    # Mirrored left and right; top and bottom.
    "67a3c6ac": Rule(7, _colourful(3, 7), np.fliplr, _symmetry(MIRRORS, EVERY_COLOUR)),
    "68b16354": Rule(7, _colourful(5, 7), np.flipud, _symmetry(MIRRORS, EVERY_COLOUR)),
    # Mirrored at the diagonal.
    "74dd1130": Rule(
        3,
        _colourful(3, 3),
        np.transpose,
        _symmetry(("identity", "half", "transpose", "anti-transpose"), EVERY_COLOUR),
    ),
    # Turned by a half.
    "6150a2bd": Rule(
        3, _colourful(3, 3), lambda grid: np.rot90(grid, 2), _symmetry(EVERY_TURN, EVERY_COLOUR)
    ),
    # Twice beside itself.
    "a416b8f3": Rule(
        8, _narrow, lambda grid: np.hstack([grid, grid]), _symmetry(MIRRORS, EVERY_COLOUR)
    ),
    # 5 and 8 exchanged.
    "d511f180": Rule(
        5,
        _colourful(3, 5, tuple(range(1, COLOURS))),
        _exchange(5, 8),
        _symmetry(EVERY_TURN, (0, 1, 2, 3, 4, 6, 7, 9)),
    ),
    # Everything one row down.
    "25ff71a9": Rule(
        3,
        _upper,
        lambda grid: np.roll(grid, 1, 0),
        _symmetry(("identity", "left-right"), EVERY_COLOUR),
    ),
    "67385a82": Rule(6, _blocks, _recolour_large, _symmetry(EVERY_TURN, ())),
    # The object alone.
    "1cf80156": Rule(12, _one_object, _crop, _symmetry(EVERY_TURN, EVERY_COLOUR[1:])),
    "00d62c1b": Rule(20, _loops, _fill_enclosed, _symmetry(EVERY_TURN, (1, 2, 3, 5, 6, 7, 8, 9))),
}
