"""Cross-fitting: projections of one side that were fitted without the pairs they project."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FoldProjections(nn.Module):
    """One projection for each fold of the training images, fitted on all other folds.

    On the pairs it was fitted on, a closed-form projection ranks almost perfectly: hard negatives
    that are drawn by it are not those that are hard elsewhere, and its tokens give the right pair
    away. Cross-fitting is the remedy of stacking and of double machine learning (Wolpert 1992;
    Chernozhukov et al. 2018, section 1). `vlp align` fits the projections, pretraining uses them
    in place of the model's own, inference never does. They are buffers, saved with the model.

    Args:
        folds: K.
        channels: of the pooled states.
        width: of a token.
        embed_dim: D of the contrastive space.
    """

    weight: Tensor
    bias: Tensor
    token_weight: Tensor

    def __init__(self, folds: int, channels: int, width: int, embed_dim: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(folds, embed_dim, channels))
        self.register_buffer("bias", torch.zeros(folds, embed_dim))
        self.register_buffer("token_weight", torch.zeros(folds, embed_dim, width))

    def feature(self, pooled: Tensor, folds: Tensor) -> Tensor:
        """Project pooled states (B, channels) of rows in `folds` (B,) int64 -> (B, D)."""
        every = torch.einsum("bc,kdc->bkd", pooled, self.weight.to(pooled.dtype)) + self.bias
        return every[torch.arange(len(folds), device=folds.device), folds]

    def tokens(self, states: Tensor, folds: Tensor) -> Tensor:
        """Project tokens (B, N, width) of rows in `folds` (B,) int64 -> (B, N, D)."""
        return states @ self.token_weight.to(states.dtype)[folds].mT


def fold_of(image_ids: Tensor, folds: int) -> Tensor:
    """Return the fold of each image, (B,) int64: ids (B,) are hashes, so their rest is random."""
    return image_ids.remainder(folds)
