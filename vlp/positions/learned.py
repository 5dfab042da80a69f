"""Learned absolute positions, added to the tokens: one vector per place, or rows and columns."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from vlp.positions.base import PositionContext, PositionEncoding


class LearnedPosition(PositionEncoding):
    """`learned-1d`: one vector per place of a sequence, as in BERT, and in ViT over raster order.

    Prefix tokens of the context get no position; text that numbers its [CLS] too passes a context
    without prefix. A sequence may be shorter than the table. Where `grid` is given, a context that
    names a grid must name that one: raster order means other places on any other.

    Args:
        width: channels of the tokens.
        length: places; rows * columns where only `grid` is given.
        grid: (rows, columns) of the patches that the table stands for.
        deviation: standard deviation of the start; 0 starts with no position at all.

    Raises:
        ValueError: neither length nor grid, both and they differ, or a negative deviation.
    """

    def __init__(
        self,
        width: int,
        length: int | None = None,
        grid: tuple[int, int] | None = None,
        deviation: float = 0.02,
    ) -> None:
        super().__init__()
        places = None if grid is None else grid[0] * grid[1]
        length = places if length is None else length
        if length is None or length < 1 or (places is not None and places != length):
            raise ValueError(
                f"learned-1d needs a positive length or a grid, not length {length} and grid {grid}"
            )
        self.grid = None if grid is None else (grid[0], grid[1])
        self.table = _table(length, width, deviation, "learned-1d")

    def tokens(self, x: Tensor, context: PositionContext) -> Tensor:
        """Add a vector to every token after the prefix: (B, T, width), same shape.

        Raises:
            ValueError: more tokens than places, fewer than the prefix, or another grid than the
                table's.
        """
        length = x.shape[-2] - context.prefix_tokens
        if not 0 <= length <= len(self.table):
            raise ValueError(
                f"learned-1d has {len(self.table)} places, which do not fit {x.shape[-2]} tokens "
                f"of which {context.prefix_tokens} are prefix"
            )
        if self.grid is not None and context.grid is not None and context.grid != self.grid:
            raise ValueError(
                f"learned-1d was made for a {_size(self.grid)} grid, not {_size(context.grid)}"
            )
        return _add(x, self.table[:length], context.prefix_tokens)


class LearnedGridPosition(PositionEncoding):
    """`learned-2d`: one vector per row and one per column (Embed-2D of Li et al. 2021).

    The paper concatenates them, rows ("vertical") in the first half of the channels; its 64 x 64
    grid of width 768 then has 49,152 parameters (reading F13). A smaller grid uses the first rows
    and columns, as in the paper's DETR experiments; a larger one has no vectors.

    Args:
        width: channels of the tokens; even where the halves are concatenated.
        grid: (rows, columns), the largest grid.
        combine: "concat" or "sum", where rows and columns both have the full width.
        deviation: standard deviation of the start; 0 starts with no position at all.

    Raises:
        ValueError: an odd width with "concat", an unknown `combine`, an empty grid, a negative
            deviation.
    """

    def __init__(
        self,
        width: int,
        grid: tuple[int, int],
        combine: str = "concat",
        deviation: float = 0.02,
    ) -> None:
        super().__init__()
        if combine not in ("concat", "sum"):
            raise ValueError(f"learned-2d: unknown combine {combine!r}; one of concat, sum")
        if combine == "concat" and width % 2:
            raise ValueError(f"learned-2d: width {width} has no halves for rows and columns")
        if min(grid) < 1:
            raise ValueError(f"learned-2d: a grid of {_size(grid)} has no patches")
        self.combine = combine
        channels = width // 2 if combine == "concat" else width
        self.table_rows = _table(grid[0], channels, deviation, "learned-2d")
        self.table_columns = _table(grid[1], channels, deviation, "learned-2d")

    def tokens(self, x: Tensor, context: PositionContext) -> Tensor:
        """Add row and column vectors to the patches: (B, prefix + rows * columns, width), same.

        Raises:
            ValueError: a larger grid than the tables', or tokens that are not prefix and grid.
        """
        largest = (len(self.table_rows), len(self.table_columns))
        rows, columns = context.grid or largest
        if rows > largest[0] or columns > largest[1]:
            raise ValueError(
                f"learned-2d has vectors for a {_size(largest)} grid, not for {rows} x {columns}"
            )
        if x.shape[-2] != context.prefix_tokens + rows * columns:
            expected = context.prefix_tokens + rows * columns
            raise ValueError(
                f"learned-2d: {context.prefix_tokens} prefix tokens and a {rows} x {columns} grid "
                f"are {expected} tokens, not {x.shape[-2]}"
            )
        down = self.table_rows[:rows, None].expand(-1, columns, -1)
        right = self.table_columns[None, :columns].expand(rows, -1, -1)
        places = down + right if self.combine == "sum" else torch.cat([down, right], -1)
        return _add(x, places.flatten(0, 1), context.prefix_tokens)


def _table(places: int, width: int, deviation: float, name: str) -> nn.Parameter:
    if deviation < 0:
        raise ValueError(f"{name}: the deviation must not be negative, not {deviation}")
    return nn.Parameter(torch.randn(places, width) * deviation)


def _add(x: Tensor, places: Tensor, prefix: int) -> Tensor:
    return x + functional.pad(places, (0, 0, prefix, 0)).to(x.dtype)


def _size(grid: tuple[int, int]) -> str:
    return f"{grid[0]} x {grid[1]}"
