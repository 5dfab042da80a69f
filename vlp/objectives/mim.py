"""Masked image modelling as in SimMIM: l1 on the raw pixels of masked patches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp.compilation import region
from vlp.objectives.loss import Loss
from vlp.precision import full_precision


class MaskToken(nn.Module):
    """Learned embedding that replaces masked patches; as a module, sharded engines gather it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(width))
        nn.init.trunc_normal_(self.token, std=0.02)

    def forward(self, patches: Tensor, mask: Tensor) -> Tensor:
        """Replace patches (B, M, width) where `mask` (B, rows, columns) bool is True."""
        return torch.where(mask.flatten(1)[..., None], self.token.to(patches.dtype), patches)


class MIMHead(nn.Module):
    """SimMIM's parameters: a linear layer from states to pixels, and the mask token."""

    def __init__(self, width: int, patch_size: int) -> None:
        super().__init__()
        self.mask_token = MaskToken(width)
        self.pixels = nn.Linear(width, 3 * patch_size**2)
        nn.init.trunc_normal_(self.pixels.weight, std=0.02)
        nn.init.zeros_(self.pixels.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Predict pixels from states (..., width) -> (..., 3 * patch_size**2), as `patchify`."""
        return self.pixels(states)


def patchify(pixels: Tensor, patch_size: int) -> Tensor:
    """Cut images (B, C, height, width) into patches in raster order, (B, M, C * patch_size**2).

    The order inside a patch is channel, row, column, as in the weights of a patch embedding.
    """
    height, width = pixels.shape[-2:]
    if height % patch_size or width % patch_size:
        raise ValueError(f"{height} x {width} pixels are not whole patches of {patch_size}")
    grid = pixels.unflatten(-1, (-1, patch_size)).unflatten(-3, (-1, patch_size))
    # (B, channel, grid row, row, grid column, column) -> grid axes first.
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


@region
def mim_loss(prediction: Tensor, pixels: Tensor, mask: Tensor, valid: Tensor) -> Loss:
    """Compute the mean absolute error of masked patches (SimMIM, Eq. 1); `count` is their number.

    Args:
        prediction: (B, M, 3 * patch_size**2).
        pixels: (B, 3, height, width), normalised.
        mask: (B, rows, columns) bool, True = masked.
        valid: (B,) bool; other rows are not counted.
    """
    rows, columns = mask.shape[-2:]
    patch_size = pixels.shape[-2] // rows
    target = patchify(pixels, patch_size)
    if target.shape != prediction.shape or pixels.shape[-1] != patch_size * columns:
        raise ValueError(
            f"{tuple(prediction.shape)} predicted values do not fit images of "
            f"{tuple(pixels.shape)} on a grid of {rows} x {columns} patches"
        )
    patch_mask = mask.flatten(1) & valid[:, None]
    prediction, target = full_precision(prediction, target)
    # Mask after the loss: selecting masked patches before it has a slower backward pass.
    losses = F.l1_loss(prediction, target, reduction="none").mean(-1)
    return Loss(torch.where(patch_mask, losses, 0).sum(), patch_mask.sum())
