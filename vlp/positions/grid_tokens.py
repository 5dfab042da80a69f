"""The checks of encodings that need a grid: there is one, and tokens are its prefix and patches."""

from __future__ import annotations

from vlp.positions.base import PositionContext


def grid_size(grid: tuple[int, int]) -> str:
    """Return a grid's rows and columns as messages name them."""
    return f"{grid[0]} x {grid[1]}"


def grid_at_hand(
    name: str, context: PositionContext, grid: tuple[int, int] | None
) -> tuple[int, int]:
    """Return the context's grid, else that of the options.

    Args:
        name: the encoding's, for the message.
        context: see `PositionContext`.
        grid: (rows, columns) where the context names none.

    Returns:
        (rows, columns).

    Raises:
        ValueError: no grid, or tokens with coordinates, which lie on none.
    """
    if context.grid is not None:
        return context.grid
    if context.coordinates is not None:
        raise ValueError(
            f"{name} needs a grid, but these tokens have coordinates, as those of a batch have "
            "where images are padded or their grids differ: batch images of one grid, unpadded"
        )
    if grid is None:
        raise ValueError(f"{name} needs a grid, in its options or in the context")
    return grid


def require_grid_tokens(
    name: str,
    context: PositionContext,
    grid: tuple[int, int] | None,
    queries: int,
    keys: int,
    prefix_bucket: bool = True,
) -> tuple[int, int]:
    """Return the grid of self-attention over a prefix and a whole grid.

    Args:
        name: the encoding's, for the message.
        context: names the grid and the prefix.
        grid: (rows, columns) where the context names none.
        queries: tokens that ask.
        keys: tokens that are asked.
        prefix_bucket: whether the encoding has an answer for prefix tokens.

    Returns:
        (rows, columns).

    Raises:
        ValueError: see `grid_at_hand`; a prefix without its bucket, or other tokens than prefix
            and grid.
    """
    rows, columns = grid_at_hand(name, context, grid)
    prefix = context.prefix_tokens
    if prefix and not prefix_bucket:
        raise ValueError(f"{name}: {prefix} prefix tokens, but prefix_bucket is False")
    tokens = prefix + rows * columns
    if (queries, keys) != (tokens, tokens):
        raise ValueError(
            f"{name}: {prefix} prefix tokens and a {rows} x {columns} grid are {tokens} tokens "
            f"that attend to themselves, not {queries} queries and {keys} keys"
        )
    return rows, columns
