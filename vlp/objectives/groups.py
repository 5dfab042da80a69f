"""Sample groups: equal runs of consecutive rows that one rank holds whole."""

from __future__ import annotations


def sample_groups(rows: int, group: int) -> tuple[int, int]:
    """How many groups `rows` consecutive samples make, and how large each is.

    A batch smaller than `group` is one group.

    Raises:
        ValueError: `group` is not positive, or does not divide a larger batch.
    """
    if group < 1:
        raise ValueError(f"a sample group needs at least 1 row, not {group}")
    if rows <= group:
        return (1, rows) if rows else (0, group)
    if rows % group:
        raise ValueError(
            f"a rank's batch of {rows} rows cannot be cut into groups of {group}: choose a batch "
            "per rank that is a multiple of the group, or a smaller group"
        )
    return rows // group, group
