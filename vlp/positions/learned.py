"""Learned absolute positions, added to the tokens: a vector per position, or per coordinate."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from vlp.positions.base import PositionContext, TokenEncoding
from vlp.positions.coordinates import (
    grid_size,
    require_grid,
    require_patches,
    resolve_grid,
    resolve_length,
    token_coordinates,
    vertical_first,
)
from vlp.positions.options import require_choice

COMBINATIONS = ("concat", "sum")


class LearnedPosition(TokenEncoding):
    """`learned-1d`: a vector per position of a sequence, as in BERT, or of raster order, as in ViT.

    Prefix tokens get no position; without a prefix [CLS] has a position, too. A sequence may be
    shorter than the table. With `grid` set, other grids are refused.

    Args:
        length: number of positions; None: rows * columns of `grid`.
        grid: (rows, columns) of the patches.
        deviation: standard deviation of the initial table.
    """

    NO_WEIGHT_DECAY = ("table",)

    def __init__(
        self,
        width: int,
        length: int | None = None,
        grid: tuple[int, int] | None = None,
        deviation: float = 0.02,
        mixer: bool = False,
    ) -> None:
        super().__init__("learned-1d", width, mixer)
        self.grid = grid
        self.table = _table(resolve_length(self.name, length, grid), width, deviation, self.name)

    def embeddings(self, x: Tensor, context: PositionContext) -> Tensor:
        """Return vectors of the first positions: (1, T - prefix, width)."""
        length = x.shape[-2] - context.prefix_tokens
        if not 0 <= length <= len(self.table):
            raise ValueError(
                f"learned-1d has {len(self.table)} positions, which do not fit {x.shape[-2]} "
                f"tokens of which {context.prefix_tokens} are prefix"
            )
        if self.grid and (grid := resolve_grid(self.name, context, self.grid)) != self.grid:
            raise ValueError(
                f"learned-1d has a table for a {grid_size(self.grid)} grid, not {grid_size(grid)}"
            )
        return self.table[None, :length]


class LearnedGridPosition(TokenEncoding):
    """`learned-2d`: a vector per row and a vector per column (Embed-2D of Li et al. 2021).

    The paper concatenates them; its 64 x 64 grid of width 768 then has 49,152 parameters
    (papers.md#fourier-f13). A smaller grid uses the first rows and columns, as in the paper's DETR
    experiments; a larger grid is refused.

    Args:
        width: channels of the tokens; even for "concat".
        grid: (rows, columns) of the largest grid.
        combine: "concat" for vectors of half the width, or "sum" for vectors of the full width.
        deviation: standard deviation of the initial tables.
    """

    NO_WEIGHT_DECAY = ("table_rows", "table_columns")

    def __init__(
        self,
        width: int,
        grid: tuple[int, int],
        combine: str = "concat",
        deviation: float = 0.02,
        mixer: bool = False,
    ) -> None:
        super().__init__("learned-2d", width, mixer)
        require_choice("learned-2d combine", combine, COMBINATIONS)
        if combine == "concat" and width % 2:
            raise ValueError(f"learned-2d: width {width} is not even, for halves of row and column")
        require_patches(self.name, grid)
        self.combine = combine
        channels = width // 2 if combine == "concat" else width
        self.table_rows = _table(grid[0], channels, deviation, self.name)
        self.table_columns = _table(grid[1], channels, deviation, self.name)

    def embeddings(self, x: Tensor, context: PositionContext) -> Tensor:
        """Return row and column vectors of the patches: (1, rows * columns, width)."""
        largest = (len(self.table_rows), len(self.table_columns))
        rows, columns = grid = resolve_grid(self.name, context, largest)
        if rows > largest[0] or columns > largest[1]:
            raise ValueError(
                f"learned-2d has vectors for a {grid_size(largest)} grid, not for {grid_size(grid)}"
            )
        require_grid(self.name, grid, x, context)
        # Rows come first, in the paper's order.
        row_vectors = self.table_rows[:rows, None].expand(-1, columns, -1)
        column_vectors = self.table_columns[None, :columns].expand(rows, -1, -1)
        return _combine([row_vectors, column_vectors], self.combine).flatten(0, 1)[None]


class LearnedBoxPosition(TokenEncoding):
    """`learned-4d`: a vector for each edge of a box, from four tables (Embed-4D of Li et al.).

    Edges are rounded to `places` lines, evenly spaced from 0 to 1 of the image. The vectors of top,
    left, bottom and right are concatenated in this order, as in the paper, or summed as in the code
    of the widget captioning model, which also has 100 lines.

    Boxes are the context's coordinates, or else the patches of the grid: with `places` n + 1 every
    edge of an n x n grid has its vector. Prefix tokens get no position.

    Args:
        width: channels of the tokens; a multiple of 4 for "concat".
        grid: (rows, columns) where the context has no grid.
        places: number of lines, and rows of each table.
        combine: "concat" for vectors of a quarter of the width, or "sum" for the full width.
        deviation: standard deviation of the initial tables.
    """

    NO_WEIGHT_DECAY = ("table_top", "table_left", "table_bottom", "table_right")

    def __init__(
        self,
        width: int,
        grid: tuple[int, int] | None = None,
        places: int = 100,
        combine: str = "concat",
        deviation: float = 0.02,
        mixer: bool = False,
    ) -> None:
        super().__init__("learned-4d", width, mixer)
        require_choice("learned-4d combine", combine, COMBINATIONS)
        if combine == "concat" and width % 4:
            raise ValueError(f"learned-4d: width {width} is not a multiple of 4, for four edges")
        if places < 2:
            raise ValueError(f"learned-4d needs at least two places, not {places}")
        self.combine, self.grid = combine, grid
        channels = width // 4 if combine == "concat" else width
        self.table_top = _table(places, channels, deviation, self.name)
        self.table_left = _table(places, channels, deviation, self.name)
        self.table_bottom = _table(places, channels, deviation, self.name)
        self.table_right = _table(places, channels, deviation, self.name)

    def embeddings(self, x: Tensor, context: PositionContext) -> Tensor:
        """Return vectors of the four edges: (B or 1, T - prefix, width)."""
        last = len(self.table_top) - 1
        # Lines are shares of the image, so every grid works, but a finer grid than in training
        # reads lines that were not trained.
        lines = token_coordinates(self.name, 4, x, context, self.grid, extent=last)
        edges = vertical_first(lines).round().clamp(0, last).long().unbind(-1)
        tables = (self.table_top, self.table_left, self.table_bottom, self.table_right)
        return _combine([table[edge] for table, edge in zip(tables, edges)], self.combine)


def _table(rows: int, width: int, deviation: float, name: str) -> nn.Parameter:
    if deviation < 0:
        raise ValueError(f"{name}: the deviation must not be negative, not {deviation}")
    return nn.Parameter(torch.randn(rows, width) * deviation)


def _combine(vectors: list[Tensor], combine: str) -> Tensor:
    return torch.cat(vectors, -1) if combine == "concat" else functools.reduce(torch.add, vectors)
