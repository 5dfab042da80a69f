"""Bits per dimension of a likelihood."""

from __future__ import annotations

import math


def bits_per_dimension(nats: float, dimensions: int) -> float:
    """Return -log2 p(x) / dimensions from the negative log-likelihood of discrete data in nats.

    Args:
        dimensions: values in x that `nats` sums over: 3 for each pixel in RGB.
    """
    if dimensions < 1:
        raise ValueError(f"dimensions must be at least 1, got {dimensions}")
    return nats / (math.log(2) * dimensions)
