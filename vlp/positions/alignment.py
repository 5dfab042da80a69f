"""Attention between words and the patches that look like them (beyond the papers)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vlp.positions.base import PositionContext, PositionEncoding

SCALE = 10.0
"""Logits of a factor of 1 where a word's cosine with a patch is 1."""


class AlignmentBias(PositionEncoding):
    """A learned multiple of the cosine of word and patch on the logits of cross-attention.

    The contextual mode of ACE-RPE has no term that joins one word and one patch: what the dual
    encoder found to belong together does not lead the cross-attention there. Here logit (i, j) of
    head h gets 10 f_h mean_g S_ij, of the similarities of Eq. 3 (papers.md#ace-a7: those of this
    pass, without a gradient unless the path has one). Tokens that are no words and the image's
    [CLS] get nothing.

    Args:
        heads: attention heads.
        start: of the factor of every second head, the others start at 0. From 0 everywhere a layer
            starts as it would without the encoding, for models that were trained so; factors then
            take thousands of steps to grow.
    """

    def __init__(self, heads: int, start: float = 1.0) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.zeros(heads))
        with torch.no_grad():
            self.factors[::2] = start

    def bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor:
        """10 f_h mean_g S_ij, (B, heads, queries, keys).

        Raises:
            ValueError: no similarities in the context.
        """
        if context.anchors is None or context.anchors.alignment is None:
            raise ValueError("alignment needs similarities in its context; it is cross-attention's")
        alignment = context.anchors.alignment  # (B, 1 + M, N)
        if context.text_queries:
            alignment = alignment.mT
        factors = (SCALE * self.factors).to(alignment.dtype)
        return factors[:, None, None] * alignment[:, None]
