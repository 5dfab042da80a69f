"""The anchor loss as printed in the ACE-RPE paper; training uses the token term instead."""

from __future__ import annotations

import torch
from torch import Tensor

from vlp.objectives.loss import Loss
from vlp.precision import full_precision, no_autocast


def anchor_loss(
    image: Tensor,
    text: Tensor,
    image_candidates: Tensor,
    text_candidates: Tensor,
    positive: Tensor,
    image_tokens: Tensor,
    text_tokens: Tensor,
    text_mask: Tensor | None = None,
    scale: float = 2.0,
    margin: float = 0.05,
) -> Tensor:
    """Compute Eqs 1-2 as printed, a scalar mean over the batch; see `paper_anchor_loss`."""
    if text_mask is None:
        text_mask = positive.new_ones(text_tokens.shape[:2])
    valid, candidate_valid = positive.new_ones(len(positive)), positive.new_ones(positive.shape[1])
    pairs = image, text, image_candidates, text_candidates, positive
    loss = paper_anchor_loss(
        *pairs, image_tokens, text_tokens, text_mask, scale, margin, valid, candidate_valid
    )
    return loss.total / loss.count.clamp(min=1)


def paper_anchor_loss(
    image: Tensor,
    text: Tensor,
    image_candidates: Tensor,
    text_candidates: Tensor,
    positive: Tensor,
    image_tokens: Tensor,
    text_tokens: Tensor,
    text_mask: Tensor,
    scale: float,
    margin: float,
    valid: Tensor,
    candidate_valid: Tensor,
) -> Loss:
    """Compute ACE-RPE's Eqs 1-2 for a batch that may have empty rows.

    Training on this loss collapses, as nothing opposes the third term (papers.md#ace-a28).

    Args:
        image, text: (B, d); these, the candidates and the tokens have unit length.
        image_candidates, text_candidates: (K, d), including the positives.
        positive: (B, K) bool.
        image_tokens: (B, M, d).
        text_tokens: (B, N, d).
        text_mask: (B, N) bool, True = word piece; False: [CLS], [SEP] and padding.
        scale: lambda.
        margin: delta.
        valid: (B,) bool, False = empty row, not counted.
        candidate_valid: (K,) or (B, K) bool; other candidates are ignored.
    """
    image, text, image_candidates, text_candidates, image_tokens, text_tokens = full_precision(
        image, text, image_candidates, text_candidates, image_tokens, text_tokens
    )
    with no_autocast(image):
        # f of a pair is the cosine of [CLS] projections (papers.md#ace-a3).
        image_to_text = image @ text_candidates.T
        text_to_image = text @ image_candidates.T
        token_similarity = text_tokens @ image_tokens.transpose(1, 2)
    losses = (
        _margin_term(image_to_text, positive, candidate_valid, scale, margin)
        + _margin_term(text_to_image, positive, candidate_valid, scale, margin)
        # This term lowers the loss (papers.md#ace-a4).
        - _token_reward(token_similarity, text_mask, scale)
    )
    return Loss(torch.where(valid, losses, 0).sum() / 2, valid.sum())


def _margin_term(
    similarity: Tensor, positive: Tensor, candidate_valid: Tensor, scale: float, margin: float
) -> Tensor:
    """Compute H of Eq. 2 for every row, (B, K) -> (B,)."""
    # Not -inf, as a row without negatives would have NaN gradients.
    lowest = torch.finfo(similarity.dtype).min
    # Eq. 2 sums over negatives (papers.md#ace-a1); a row without negatives has no cost.
    negatives = (scale * similarity).masked_fill(positive | ~candidate_valid, lowest)
    soft_maximum = negatives.logsumexp(-1, keepdim=True) / scale
    cost = (soft_maximum + margin - similarity).clamp(min=0)
    positive = positive & candidate_valid
    return torch.where(positive, cost, 0).sum(-1) / positive.sum(-1).clamp(min=1)


def _token_reward(similarity: Tensor, text_mask: Tensor, scale: float) -> Tensor:
    """Compute the third term of Eq. 1, (B, N, M) -> (B,); 0 for a text without words."""
    lowest = torch.finfo(similarity.dtype).min
    masked = (scale * similarity).masked_fill(~text_mask[..., None], lowest)
    return torch.where(text_mask.any(-1), masked.flatten(1).logsumexp(-1) / scale, 0)
