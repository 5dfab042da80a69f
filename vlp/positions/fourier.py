"""Learnable Fourier features of positions, modulated by an MLP (Li et al. 2021, Eqs 2-7, 10)."""

from __future__ import annotations

import math
from functools import partial, reduce

import torch
from torch import Tensor, nn

from vlp.positions.base import PositionContext, TokenEncoding
from vlp.positions.coordinates import require_extent, token_coordinates
from vlp.positions.modulator import Modulator
from vlp.positions.options import require_choice, require_defaults


def fourier_features(coords: Tensor, weight: Tensor) -> Tensor:
    """Return r_x = 1 / sqrt(F) [cos x W_r^T, sin x W_r^T] (Eq. 2, papers.md#fourier-f4).

    **Reconstruction (papers.md#fourier-f1)**: the available text lost the formula; its prefactor is
    that of Algorithm 1, with F the number of features. r_x . r_y is a function of x - y alone
    (Eq. 3). If W_r is drawn from N(0, gamma^-2), it tends to a Gaussian kernel of width gamma as F
    grows (Eq. 5, papers.md#fourier-f3).

    Args:
        coords: (..., M), in the unit of gamma.
        weight: W_r (F / 2, M), radians per unit.

    Returns:
        (..., F), cosines, then sines; half precision is computed in float32.
    """
    if weight.ndim != 2 or not len(weight) or weight.shape[1] != coords.shape[-1]:
        raise ValueError(
            f"a weight (features / 2, {coords.shape[-1]}) belongs to coordinates "
            f"{tuple(coords.shape)}, not {tuple(weight.shape)}"
        )
    out_dtype = torch.promote_types(coords.dtype, weight.dtype)
    dtype = torch.promote_types(out_dtype, torch.float32)
    # x W_r^T. Not a matrix product, in which autocast and TF32 would round the angles.
    columns = zip(coords.to(dtype).unbind(-1), weight.to(dtype).unbind(-1))
    angles = reduce(torch.add, [x.unsqueeze(-1) * frequencies for x, frequencies in columns])
    # Every position has the squared norm 1/2.
    features = torch.cat([angles.cos(), angles.sin()], -1) * (2 * len(weight)) ** -0.5
    return features.to(out_dtype)


def kl_regulariser(weight: Tensor, log_variance: Tensor, per_dim: bool = False) -> Tensor:
    """Return KL(N(mu, s^2) || N(0, s_t^2)) for mean mu and variance s^2 of W_r (Eq. 10).

    **Reconstruction (papers.md#fourier-f8)**: the available text lost the formula. The direction is
    from the weights to the target; s^2 is the population variance.

    Args:
        weight: W_r (F / 2, M).
        log_variance: ln s_t^2, a scalar.
        per_dim: average the divergences of the M coordinates. False takes mu and s^2 over all
            entries, so that frequencies may be higher in one direction than in another.

    Returns:
        A scalar, at least 0, finite with its gradient also for equal weights.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    columns = weight.to(dtype) if per_dim else weight.to(dtype).reshape(-1, 1)
    if weight.ndim != 2 or len(columns) < 2:
        raise ValueError(f"a weight of shape {tuple(weight.shape)} has no spread to regularise")
    mean = columns.mean(0)
    # Clamped, as the variance of equal weights is 0, without a logarithm.
    variance = columns.var(0, correction=0).clamp(min=torch.finfo(dtype).tiny)
    log_variance = log_variance.to(dtype)
    ratio = (variance + mean.square()) * (-log_variance).exp()
    divergence = (log_variance - variance.log() + ratio - 1) / 2
    return divergence.mean().to(weight.dtype)


class FourierPosition(TokenEncoding):
    """`fourier`: learnable Fourier features and an MLP, in place of a table (Algorithm 1).

    Coordinates (x, y or x0, y0, x1, y1) are split into `groups` in this order, which share W_r and
    the MLP; each group gives width / groups channels (papers.md#fourier-f7). For boxes
    (`dimensions` 4) 1, 2 and 4 groups are the paper's 1/4, 2/2 and 4/1. With 768 channels, 384
    features and 32 hidden channels there are 38,048 parameters (papers.md#fourier-f13).

    Without `extent` coordinates count patches, so similarity falls over gamma patches on every
    grid. With `extent` 1 they are shares of the image, as in DETR. The context's coordinates are
    shares and need `extent` or a grid. Any grid works. Prefix tokens get no position.

    **Reconstruction (papers.md#fourier-f2)**: W_r starts from N(0, gamma^-2), a variance.

    Args:
        grid: (rows, columns) where the context has no grid.
        dimensions: 2 for points x, y, 4 for boxes; each patch of a grid is a box.
        groups: number of groups of coordinates.
        features: F of a group, even; None: half the width, as in the paper's Reformer, or without
            MLP and projection the width of a group.
        hidden: hidden channels H of the MLP.
        gamma: initial distance scale, in patches or the unit of `extent`.
        extent: the image's width and height; None counts patches.
        learnable: train W_r; False: the paper's fixed Fourier features.
        mlp: apply an MLP (Eq. 6); False: the features are the position ('Learnable-Fourier').
        projection: without an MLP, apply one dense layer.
        initialisation: "normal", or "uniform" in [0, 1] as in Table 6, without gamma.
        approximate, dropout: see `Modulator`.
        norm: see `Modulator`; initial positions then differ by 0.5 per channel instead of 0.02.
        regularised: learn the target variance of `regulariser`, initially gamma^-2.
    """

    def __init__(
        self,
        width: int,
        grid: tuple[int, int] | None = None,
        dimensions: int = 2,
        groups: int = 1,
        features: int | None = None,
        hidden: int = 32,
        gamma: float = 1.0,
        extent: float | None = None,
        learnable: bool = True,
        mlp: bool = True,
        projection: bool = False,
        initialisation: str = "normal",
        approximate: str = "none",
        dropout: float = 0.0,
        norm: bool = False,
        regularised: bool = False,
        mixer: bool = False,
    ) -> None:
        super().__init__("fourier", width, mixer)
        if dimensions not in (2, 4):
            raise ValueError(f"fourier positions have 2 or 4 dimensions, not {dimensions}")
        if groups < 1 or dimensions % groups or width % groups:
            raise ValueError(
                f"fourier: {groups} groups do not divide {dimensions} coordinates and width {width}"
            )
        group_width = width // groups
        if features is None:
            features = width // 2 if mlp or projection else group_width
        if features < 2 or features % 2:
            raise ValueError(f"fourier: {features} features are no pairs of cosine and sine")
        if not (mlp or projection) and features != group_width:
            raise ValueError(
                f"fourier: without mlp and projection each of {groups} groups needs {group_width} "
                f"features, its part of width {width}, not {features}"
            )
        if mlp and projection:
            raise ValueError("fourier: projection needs mlp=False")
        if not mlp:
            refuse = partial(require_defaults, "fourier", FourierPosition, "without the MLP")
            refuse(hidden=hidden, approximate=approximate, dropout=dropout, norm=norm)
        if regularised and not learnable:
            raise ValueError("fourier: regularised needs learnable=True")
        if not 0 < gamma < math.inf:
            raise ValueError(f"fourier: gamma must be positive, not {gamma}")
        require_extent("fourier", extent)
        self.grid, self.dimensions, self.groups, self.extent = grid, dimensions, groups, extent

        shape = features // 2, dimensions // groups
        frequencies = _initial_frequencies(shape, initialisation, gamma)
        self.frequencies: Tensor
        if learnable:
            self.frequencies = nn.Parameter(frequencies)
        else:
            self.register_buffer("frequencies", frequencies)
        # As a logarithm, so that the variance stays positive (papers.md#fourier-f9).
        target = torch.tensor(-2 * math.log(gamma))
        self.log_variance = nn.Parameter(target) if regularised else None
        self.modulator: nn.Module | None = None
        if mlp:
            self.modulator = Modulator(features, hidden, group_width, approximate, dropout, norm)
        elif projection:
            self.modulator = nn.Linear(features, group_width)

    def features(self, x: Tensor, context: PositionContext) -> Tensor:
        """Return Fourier features before any MLP: (B or 1, T - prefix, groups, F)."""
        coords = token_coordinates(self.name, self.dimensions, x, context, self.grid, self.extent)
        return fourier_features(coords.unflatten(-1, (self.groups, -1)), self.frequencies)

    def embeddings(self, x: Tensor, context: PositionContext) -> Tensor:
        """Return positions of the tokens after the prefix: (B or 1, T - prefix, width)."""
        features = self.features(x, context)
        if self.modulator is not None:
            features = self.modulator(features.to(self.frequencies.dtype))
        return features.flatten(-2)

    def regulariser(self, strength: float = 1.0, per_dim: bool = False) -> Tensor:
        """Return strength * KL of the weights against the learned target, a term of the loss.

        The strength is lambda of Eq. 11 (papers.md#fourier-f10). Under wrappers that gather weights
        use `vlp.positions.base.call_method`, which takes positional arguments alone.
        """
        if self.log_variance is None:
            raise ValueError("fourier: the regulariser needs the option regularised=True")
        return strength * kl_regulariser(self.frequencies, self.log_variance, per_dim)


class MLPPosition(TokenEncoding):
    """`mlp`: the MLP of the Fourier encoder on raw coordinates, the paper's 'MLP' ablation.

    Coordinates are shares of the image by default (`extent` 1), as in DETR. Any grid works. Prefix
    tokens get no position.

    Args:
        grid: (rows, columns) where the context has no grid.
        dimensions: 2 for points x, y, 4 for boxes; each patch of a grid is a box.
        hidden: hidden channels of the MLP.
        extent: the image's width and height in the unit of the coordinates; None counts patches.
        approximate, dropout: see `Modulator`.
    """

    def __init__(
        self,
        width: int,
        grid: tuple[int, int] | None = None,
        dimensions: int = 2,
        hidden: int = 32,
        extent: float | None = 1.0,
        approximate: str = "none",
        dropout: float = 0.0,
        mixer: bool = False,
    ) -> None:
        super().__init__("mlp", width, mixer)
        if dimensions not in (2, 4):
            raise ValueError(f"mlp positions have 2 or 4 dimensions, not {dimensions}")
        require_extent("mlp", extent)
        self.grid, self.dimensions, self.extent = grid, dimensions, extent
        self.modulator = Modulator(dimensions, hidden, width, approximate, dropout)

    def embeddings(self, x: Tensor, context: PositionContext) -> Tensor:
        """Return positions of the tokens after the prefix: (B or 1, T - prefix, width)."""
        return self.modulator(
            token_coordinates(self.name, self.dimensions, x, context, self.grid, self.extent)
        )


def _initial_frequencies(shape: tuple[int, int], initialisation: str, gamma: float) -> Tensor:
    require_choice("fourier initialisation", initialisation, ("normal", "uniform"))
    # The variance is gamma^-2; a widely copied port uses gamma^-2 as the standard deviation.
    return torch.randn(shape) / gamma if initialisation == "normal" else torch.rand(shape)
