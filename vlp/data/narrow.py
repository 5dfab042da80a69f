"""Columns of a million rows in few bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def narrow(values: ArrayLike) -> np.ndarray:
    """Return numbers from 0 on in the smallest signed type that holds them.

    Signed, because unsigned ones of 64 bits mix with signed ones into floats. Sums are of 64 bits
    (`np.sum`, `np.cumsum`); a column plus another one is as narrow as they are.
    """
    numbers = np.asarray(values, dtype=np.int64)
    return numbers.astype(np.min_scalar_type(~int(numbers.max(initial=0))))
