"""Selection of the test samples that are evaluated."""

from __future__ import annotations

import numpy as np

from evaluation.core.samples import EvaluationError


def evenly_spread(total: int, limit: int | None) -> list[int]:
    """Choose so many of `total` samples, from the first to the last; None is all of them.

    Raises:
        EvaluationError: a limit below 1.
    """
    if limit is not None and limit < 1:
        raise EvaluationError(f"limit {limit}: at least one sample is needed")
    count = total if limit is None else min(limit, total)
    numbers: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
    return numbers
