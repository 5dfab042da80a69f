"""Reach of the windows of Eq. 7, and the windows that are possible (papers.md#ace-a10)."""

from __future__ import annotations

import math
from typing import Literal

Metric = Literal["euclidean", "manhattan", "chebyshev"]
"""Distance between patches, D_p2p of Eq. 7 (papers.md#ace-a11)."""


def text_reach(window: int | None) -> int | None:
    """Return the tokens to either side of a window of B_t tokens; None is unbounded.

    Raises:
        ValueError: a window that is not a positive odd number.
    """
    if window is not None and (window < 1 or window % 2 == 0):
        raise ValueError(f"text_window must be an odd number of tokens, not {window}")
    return None if window is None else window // 2


def patch_reach(window: int | None) -> int | None:
    """Patches to either side of a square window of B_p patches; None is unbounded.

    Raises:
        ValueError: a window that is not the square of a positive odd number.
    """
    if window is None:
        return None
    side = math.isqrt(window) if window > 0 else 0
    if side * side != window or side % 2 == 0:
        raise ValueError(f"patch_window must be an odd square of patches (1, 9, 25), not {window}")
    return side // 2
