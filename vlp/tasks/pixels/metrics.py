"""Bits per dimension of a likelihood."""

from __future__ import annotations

import math


def bits_per_dimension(nats: float, dimensions: int) -> float:
    """-log2 p(x) / dimensions, of the negative log-likelihood of discrete data in nats.

    Args:
        dimensions: numbers that x consists of, summed likewise: 3 for each pixel in RGB.

    Returns:
        Bits; log2 of the levels for a model that knows nothing, 8 for pixels of 256 levels.
    """
    if dimensions < 1:
        raise ValueError(f"the likelihood of {dimensions} dimensions has no mean")
    return nats / (math.log(2) * dimensions)
