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
            channels: D of the space; channels beyond the lesser width of x and y are zero.
            shrinkage: share of the mean variance of x, or of y, that is added to its variances.
        """
        x, y = self._sides
        x_scale, y_scale = x.whitening(shrinkage), y.whitening(shrinkage)
        x_directions, correlations, y_directions = torch.linalg.svd(
            x_scale[:, None] * self._cross_covariance * y_scale, full_matrices=False
        )

        def projection(side: _Side, scale: Tensor, directions: Tensor) -> Affine:
            weight = torch.zeros(channels, len(side.mean), dtype=torch.float64)
            rows = (directions * correlations)[:, :channels].T * scale @ side.vectors.T
            weight[: len(rows)] = rows
            return Affine(weight, -weight @ side.mean)

        return projection(x, x_scale, x_directions), projection(y, y_scale, y_directions.T)


class _Side(NamedTuple):
    """Mean (C,) of x or y, and its covariance: variances (C,) along the columns of `vectors`."""

    mean: Tensor
    variances: Tensor
    vectors: Tensor

    def whitening(self, shrinkage: float) -> Tensor:
        """Return the factors (C,) along the eigenvectors that whiten the shrunk covariance."""
        # By rounding, variances may be slightly negative; all may be 0.
        mean_variance = self.variances.mean().clamp(min=torch.finfo(torch.float64).tiny)
        return (self.variances.clamp(min=0) + shrinkage * mean_variance).rsqrt()


def mean_reciprocal_rank(x: Tensor, y: Tensor, pair_ids: Tensor) -> float:
    """Return the mean reciprocal rank of pairs by cosine over both directions, at most 1.

    x, y: (P, D); row i of x and row i of y are a pair. pair_ids: (P, 2) int64, ids of image and
    caption; other `positives` of a row are not ranked.
    """
    cosines = functional.normalize(x, dim=-1) @ functional.normalize(y, dim=-1).T
    is_pair = torch.eye(len(pair_ids), dtype=torch.bool)
    cosines.masked_fill_(positives(pair_ids, pair_ids) & ~is_pair, -math.inf)
    ranks = [pessimistic_ranks(scores.numpy(), is_pair.numpy()) for scores in (cosines, cosines.T)]
    return float((1 / (1 + np.stack(ranks))).mean())
