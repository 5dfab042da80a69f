"""Ranks beside each other: who waits longest for data, and who is slower than the others."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

_SLOW = 0.2


class Pace(NamedTuple):
    """Seconds of one rank between two log lines, and its store's failures.

    data: waited for batches; busy: not in a collective call, data included; retries: tries of files
    that were repeated.
    """

    data: float
    busy: float
    retries: int


def compare(ranks: Sequence[Pace], seconds: float) -> tuple[dict[str, Any], str | None]:
    """Return figures of the slowest rank and all retries, and a sentence where it is a straggler.

    Args:
        ranks: in their order.
        seconds: time between the two log lines.

    Returns:
        `store_retries`, and of several ranks `data_wait_share_max`, `slowest_rank` and its
        `slowest_rank_lag`: the share of time by which it is busier than the median of the others.
        On a GPU a collective call returns at once, so that the lag shows slow data and a slow host
        only.
    """
    figures: dict[str, Any] = {"store_retries": sum(pace.retries for pace in ranks)}
    if len(ranks) == 1:
        return figures, None
    slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].busy)
    others = [pace for rank, pace in enumerate(ranks) if rank != slowest]
    lag = (ranks[slowest].busy - median(pace.busy for pace in others)) / seconds
    figures |= {
        "data_wait_share_max": max(pace.data for pace in ranks) / seconds,
        "slowest_rank": slowest,
        "slowest_rank_lag": lag,
    }
    if lag < _SLOW:
        return figures, None
    data = (ranks[slowest].data - median(pace.data for pace in others)) / seconds
    cause = "it waits for data" if data > lag / 2 else "it computes"
    return figures, f"rank {slowest} is slow: {cause} {lag:.0%} of the time longer than the others"
