"""Late interaction of a pair: how well each word of the text finds a patch of the image."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TokenScore(nn.Module):
    """A learned multiple of the mean over words of the best patch's cosine.

    Added to the match score of cross-modal states, it hands over what the token term of the
    contrastive objective has taught the token projections (FILIP, Yao et al. 2021, section 3.1,
    from text to image).

    Args:
        start: of the factor.
    """

    def __init__(self, start: float) -> None:
        super().__init__()
        # A unit of the parameter is the factor it starts with: Adam moves both by like shares.
        self.start = start
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, image_tokens: Tensor, text_tokens: Tensor, word_mask: Tensor) -> Tensor:
        """Score pairs.

        Args:
            image_tokens: (..., M, D) of unit length.
            text_tokens: (B, N, D) of unit length.
            word_mask: (B, N) bool, True = a real word; a text without words scores 0.

        Returns:
            (B,) in the tokens' type.
        """
        with torch.autocast(text_tokens.device.type, enabled=False):
            best = (text_tokens @ image_tokens.mT).amax(-1)
        words = word_mask.sum(-1).clamp(min=1)
        return self.start * self.factor * (best * word_mask).sum(-1) / words
