"""Regularised canonical correlation: contrastive projections in closed form, without training.

Projections of maximum correlation between pairs (Hotelling 1936), with shrinkage as in Vinod's
canonical ridge (1976) and directions weighted by correlation (Gong et al. 2014, section 3.3).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vlp.metrics import pessimistic_ranks
from vlp.objectives.contrastive import positives


class Affine(NamedTuple):
    """A linear layer: weight (D, channels) and bias (D,)."""

    weight: Tensor
    bias: Tensor


class PairMoments:
    """First and second moments of pairs of vectors x and y, summed in float64."""

    def __init__(self, x_channels: int, y_channels: int) -> None:
        self.x_channels, self.y_channels, self.count = x_channels, y_channels, 0
        channels = x_channels + y_channels
        self._sum = torch.zeros(channels, dtype=torch.float64)
        self._products = torch.zeros(channels, channels, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add pairs: `x` (B, x_channels) and `y` (B, y_channels)."""
        pairs = torch.cat([x, y], dim=1).double().cpu()
        self.count += len(pairs)
        self._sum += pairs.sum(0)
        self._products.addmm_(pairs.T, pairs)

    def __add__(self, other: PairMoments) -> PairMoments:
        """Return the moments of all pairs."""
        total = PairMoments(self.x_channels, self.y_channels)
        total.count = self.count + other.count
        total._sum = self._sum + other._sum
        total._products = self._products + other._products
        return total

    def mean_and_covariance(self) -> tuple[Tensor, Tensor]:
        """Return mean (C,) and covariance (C, C) of the concatenated x and y, C channels."""
        if self.count < 2:
            raise ValueError(f"{self.count} pairs have no covariance; give at least 2")
        mean = self._sum / self.count
        return mean, self._products / self.count - torch.outer(mean, mean)


class CanonicalCorrelation:
    """Canonical correlation of pairs, solved for any shrinkage after one decomposition."""

    def __init__(self, moments: PairMoments) -> None:
        split = moments.x_channels
        mean, covariance = moments.mean_and_covariance()
        self._sides = [
            _Side(mean[part], *torch.linalg.eigh(covariance[part, part]))
            for part in (slice(None, split), slice(split, None))
        ]
        x, y = self._sides
        self._cross_covariance = x.vectors.T @ covariance[:split, split:] @ y.vectors

    def projections(self, channels: int, shrinkage: float) -> tuple[Affine, Affine]:
        """Return projections of x and y into one space, where cosines of pairs are large.

        Args:
            channels: D of the space; channels beyond the narrower side's number are zero.
            shrinkage: share of a side's mean variance that is added to each of its variances.
        """
        x, y = (side.whitening(shrinkage) for side in self._sides)
        left, correlations, right = torch.linalg.svd(
            x[:, None] * self._cross_covariance * y, full_matrices=False
        )
        layers = []
        for directions, scale, side in zip((left, right.T), (x, y), self._sides):
            weight = torch.zeros(channels, len(side.mean), dtype=torch.float64)
            rows = (directions * correlations)[:, :channels].T * scale @ side.vectors.T
            weight[: len(rows)] = rows
            layers.append(Affine(weight, -weight @ side.mean))
        return layers[0], layers[1]


class _Side(NamedTuple):
    """Mean (C,) of a side, and its covariance as variances (C,) along eigenvectors, in columns."""

    mean: Tensor
    variances: Tensor
    vectors: Tensor

    def whitening(self, shrinkage: float) -> Tensor:
        """Return the factors (C,) along the eigenvectors that whiten the shrunk covariance."""
        mean = self.variances.mean().clamp(min=torch.finfo(torch.float64).tiny)
        return (self.variances.clamp(min=0) + shrinkage * mean).rsqrt()


def mean_reciprocal_rank(x: Tensor, y: Tensor, pair_ids: Tensor) -> float:
    """Return the mean reciprocal rank of pairs by cosine over both directions, at most 1.

    x, y: (P, D); rows i of both are a pair. pair_ids: (P,) int64 of images, or (P, 2) of images and
    captions; pairs with an equal id are no wrong answers for each other.
    """
    cosines = functional.normalize(x, dim=-1) @ functional.normalize(y, dim=-1).T
    diagonal = torch.eye(len(pair_ids), dtype=torch.bool)
    cosines.masked_fill_(positives(pair_ids, pair_ids) & ~diagonal, -math.inf)
    ranks = [pessimistic_ranks(side.numpy(), diagonal.numpy()) for side in (cosines, cosines.T)]
    return float((1 / (1 + np.stack(ranks))).mean())
