"""The check of encodings whose pairs need a grid: tokens are the prefix and the grid's patches."""

from __future__ import annotations

from vlp.positions.base import PositionContext


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
        ValueError: no grid, a prefix without its bucket, or other tokens than prefix and grid.
    """
    grid, prefix = context.grid or grid, context.prefix_tokens
    if grid is None:
        raise ValueError(f"{name} needs a grid, in its options or in the context")
    rows, columns = grid
    if prefix and not prefix_bucket:
        raise ValueError(f"{name}: {prefix} prefix tokens, but prefix_bucket is False")
    tokens = prefix + rows * columns
    if (queries, keys) != (tokens, tokens):
        raise ValueError(
            f"{name}: {prefix} prefix tokens and a {rows} x {columns} grid are {tokens} tokens "
            f"that attend to themselves, not {queries} queries and {keys} keys"
        )
    return rows, columns
