"""Regularised canonical correlation: contrastive projections in closed form, without a gradient.

Projections of most correlation on pairs (Hotelling 1936), with shrinkage as in Vinod's canonical
ridge (1976) and directions weighted by correlation (Gong et al. 2014, section 3.3).
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
        """Return the moments of the pairs of both."""
        total = PairMoments(self.x_channels, self.y_channels)
        total.count = self.count + other.count
        total._sum = self._sum + other._sum
        total._products = self._products + other._products
        return total

    def mean_and_covariance(self) -> tuple[Tensor, Tensor]:
        """Return the mean (C,) and the covariance (C, C) of both sides side by side."""
        if self.count < 2:
            raise ValueError(f"{self.count} pairs have no covariance; at least 2 are needed")
        mean = self._sum / self.count
        return mean, self._products / self.count - torch.outer(mean, mean)


class CanonicalCorrelation:
    """The solution for `moments` of pairs, which gives projections of any shrinkage."""

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
        """Solve for the projections of x and y, for cosines that rank pairs by linear correlation.

        Args:
            channels: D of the shared space; directions beyond the narrower side's are zero.
            shrinkage: share of the mean variance that is added to every variance of its side.
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
    """Mean (C,), and variances (C,) along the covariance's eigenvectors (C, C, in columns)."""

    mean: Tensor
    variances: Tensor
    vectors: Tensor

    def whitening(self, shrinkage: float) -> Tensor:
        """Return factors (C,) along the eigenvectors, covariance shrunk to its mean variance."""
        mean = self.variances.mean().clamp(min=torch.finfo(torch.float64).tiny)
        return (self.variances.clamp(min=0) + shrinkage * mean).rsqrt()


def mean_reciprocal_rank(x: Tensor, y: Tensor, ids: Tensor) -> float:
    """Return the mean reciprocal rank of pairs by cosine, 1 at best, over both directions.

    Rows i of `x` and `y` (P, D) are a pair; `ids` (P,) int64 are of images, or (P, 2) of images and
    captions, and pairs that share one are no wrong answers for each other.
    """
    cosines = functional.normalize(x, dim=-1) @ functional.normalize(y, dim=-1).T
    diagonal = torch.eye(len(ids), dtype=torch.bool)
    cosines.masked_fill_(positives(ids, ids) & ~diagonal, -math.inf)
    ranks = [pessimistic_ranks(side.numpy(), diagonal.numpy()) for side in (cosines, cosines.T)]
    return float((1 / (1 + np.stack(ranks))).mean())
