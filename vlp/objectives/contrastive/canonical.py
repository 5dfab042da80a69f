"""Regularised canonical correlation: contrastive projections in closed form, without a gradient.

The projections of both sides that agree most on pairs (Hotelling 1936), with shrinkage as in
Vinod's canonical ridge (1976) and directions weighted by their correlations, as in Gong et al. 2014
(section 3.3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Affine(NamedTuple):
    """A linear layer: weight (D, channels) and bias (D,)."""

    weight: Tensor
    bias: Tensor


class PairMoments:
    """First and second moments of pairs of vectors, summed in float64.

    Args:
        x_channels: of the one side.
        y_channels: of the other.
    """

    def __init__(self, x_channels: int, y_channels: int) -> None:
        self.x_channels, self.count = x_channels, 0
        channels = x_channels + y_channels
        self._sum = torch.zeros(channels, dtype=torch.float64)
        self._products = torch.zeros(channels, channels, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add pairs: `x` (B, x_channels) and `y` (B, y_channels)."""
        both = torch.cat([x, y], dim=1).double().cpu()
        self.count += len(both)
        self._sum += both.sum(0)
        self._products.addmm_(both.T, both)

    def mean_and_covariance(self) -> tuple[Tensor, Tensor]:
        """Return the mean (C,) and the covariance (C, C) of both sides side by side.

        Raises:
            ValueError: fewer than two pairs were added.
        """
        if self.count < 2:
            raise ValueError(f"{self.count} pairs have no covariance; at least 2 are needed")
        mean = self._sum / self.count
        return mean, self._products / self.count - torch.outer(mean, mean)


def canonical_projections(
    moments: PairMoments, channels: int, shrinkage: float = 0.1
) -> tuple[Affine, Affine]:
    """Solve for the projections of both sides.

    Args:
        moments: of the pairs.
        channels: D of the shared space; directions beyond the narrower side's are zero.
        shrinkage: share of the mean variance that is added to every variance of its side.

    Returns:
        The layers of x and y: cosines of what they give rank pairs by linear correlation.

    Raises:
        ValueError: fewer than two pairs were added.
    """
    split = moments.x_channels
    mean, covariance = moments.mean_and_covariance()
    root_x = _inverse_root(covariance[:split, :split], shrinkage)
    root_y = _inverse_root(covariance[split:, split:], shrinkage)
    left, correlations, right = torch.linalg.svd(
        root_x @ covariance[:split, split:] @ root_y, full_matrices=False
    )
    layers = []
    for directions, root, centre in (
        (left, root_x, mean[:split]),
        (right.T, root_y, mean[split:]),
    ):
        weight = torch.zeros(channels, len(centre), dtype=torch.float64)
        found = ((directions * correlations)[:, :channels].T) @ root
        weight[: len(found)] = found
        layers.append(Affine(weight, -weight @ centre))
    return layers[0], layers[1]


def _inverse_root(covariance: Tensor, shrinkage: float) -> Tensor:
    """Return the inverse square root of a covariance (C, C), shrunk to its mean variance."""
    variance = covariance.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)
    values, vectors = torch.linalg.eigh(covariance)
    scaled = vectors / (values.clamp(min=0) + shrinkage * variance).sqrt()
    return scaled @ vectors.T
