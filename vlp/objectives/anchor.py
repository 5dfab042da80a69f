"""The anchor loss: as printed in the ACE-RPE paper, and the token term that replaces it."""

from __future__ import annotations

import torch
from torch import Tensor

from vlp.objectives.contrastive import candidate_cross_entropy
from vlp.objectives.groups import sample_groups
from vlp.objectives.loss import Loss
from vlp.objectives.precision import full_precision, no_autocast
from vlp.objectives.word_response import word_response


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
    """The loss of Eqs 1-2 as printed, a scalar: mean over the batch.

    See `paper_anchor_loss` for shapes and for what the readings fix.
    """
    loss = paper_anchor_loss(
        image,
        text,
        image_candidates,
        text_candidates,
        positive,
        image_tokens,
        text_tokens,
        text_mask,
        scale,
        margin,
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
    text_mask: Tensor | None = None,
    scale: float = 2.0,
    margin: float = 0.05,
    valid: Tensor | None = None,
    candidate_valid: Tensor | None = None,
) -> Loss:
    """ACE-RPE, Eqs 1-2, with empty slots.

    `image`, `text` (B, d), candidates (K, d) that include the positives, `positive` (B, K) bool,
    `image_tokens` (B, M, d), `text_tokens` (B, N, d), all unit length; `text_mask` (B, N) bool,
    True = a real word ([CLS], [SEP] and padding are False). Rows with `valid` (B,) False count
    nowhere, candidates with `candidate_valid` (K,) False are neither positive nor negative.

    Eq. 2 sums over negatives (reading A1); a row averages it over its positives, and its negatives
    are the valid rest. Without any negative the row's term is 0. f on the pair level is the cosine
    of the [CLS] projections (reading A3, a reconstruction: the paper does not say); the third term
    runs over patches and real words of the matching pair and lowers the loss (A4). Trained as
    printed (reading A28) it collapses: nothing opposes the third term.
    """
    image, text, image_candidates, text_candidates, image_tokens, text_tokens = full_precision(
        image, text, image_candidates, text_candidates, image_tokens, text_tokens
    )
    if text_mask is None:
        text_mask = positive.new_ones(text_tokens.shape[:2])
    if valid is None:
        valid = positive.new_ones(positive.shape[0])
    if candidate_valid is None:
        candidate_valid = positive.new_ones(positive.shape[1])
    with no_autocast(image):
        image_to_text = image @ text_candidates.T
        text_to_image = text @ image_candidates.T
        token_similarity = text_tokens @ image_tokens.transpose(1, 2)
    rows = (
        _margin_term(image_to_text, positive, candidate_valid, scale, margin)
        + _margin_term(text_to_image, positive, candidate_valid, scale, margin)
        - _token_reward(token_similarity, text_mask, scale)
    )
    return Loss(torch.where(valid, rows, 0).sum() / 2, valid.sum())


def _margin_term(
    similarity: Tensor, positive: Tensor, candidate_valid: Tensor, scale: float, margin: float
) -> Tensor:
    """H of Eq. 2 for every row, (B, K) -> (B,)."""
    lowest = torch.finfo(similarity.dtype).min  # not -inf: NaN gradients in a row of nothing else
    negatives = (scale * similarity).masked_fill(positive | ~candidate_valid, lowest)
    hardest = negatives.logsumexp(-1, keepdim=True) / scale
    cost = (hardest + margin - similarity).clamp(min=0)
    positive = positive & candidate_valid
    return torch.where(positive, cost, 0).sum(-1) / positive.sum(-1).clamp(min=1)


def _token_reward(similarity: Tensor, text_mask: Tensor, scale: float) -> Tensor:
    """Third term of Eq. 1, (B, N, M) -> (B,); 0 for a text without words."""
    lowest = torch.finfo(similarity.dtype).min
    masked = (scale * similarity).masked_fill(~text_mask[..., None], lowest)
    return torch.where(text_mask.any(-1), masked.flatten(1).logsumexp(-1) / scale, 0)


def token_scores(
    image_tokens: Tensor, text_tokens: Tensor, word_mask: Tensor, alpha: float = 1.0
) -> Tensor:
    """How well each text's words find a patch of each picture, before tau.

    `image_tokens` (..., B, M, D), `text_tokens` (..., T, N, D), unit length, `word_mask`
    (..., T, N) bool -> (..., B, T): mean over real words of
    (max_m s_mn - alpha * mean_m relu(s_mn)). A hard maximum over patches, because sums of
    exponentials do not select; less the word's mean response, so that words which answer to
    everything gain nothing. A text without words scores 0. Leading dimensions are sample groups,
    which never meet; each holds T·N·B·M similarities in memory.
    """
    image_tokens, text_tokens = full_precision(image_tokens, text_tokens)
    texts, words = text_tokens.shape[-3:-1]
    response = word_response(text_tokens.flatten(-3, -2), image_tokens, alpha)
    response = response.unflatten(-2, (texts, words))
    number = word_mask.sum(-1).clamp(min=1)
    score = (response * word_mask[..., None]).sum(-2) / number[..., None]
    return score.transpose(-1, -2)


def token_loss(
    image_tokens: Tensor,
    text_tokens: Tensor,
    word_mask: Tensor,
    image_ids: Tensor,
    valid: Tensor,
    scale: Tensor | float,
    alpha: float = 1.0,
    group: int = 16,
) -> Loss:
    """Cross-entropy both ways over tau * `token_scores` within groups of consecutive samples.

    `image_tokens` (B, M, D), `text_tokens` (B, N, D), unit length, `word_mask` (B, N) bool,
    `image_ids` (B,), `valid` (B,) bool, `scale` is tau. Captions of one picture share the target;
    rows that are not valid, or whose text has no word, drop out on both sides. Counts rows.

    Raises:
        ValueError: the batch is larger than `group` and not a multiple of it.
    """
    number, size = sample_groups(image_tokens.shape[0], group)
    valid = (valid & word_mask.any(-1)).unflatten(0, (number, size))
    scores = token_scores(
        image_tokens.unflatten(0, (number, size)),
        text_tokens.unflatten(0, (number, size)),
        word_mask.unflatten(0, (number, size)),
        alpha,
    )
    logits = scale * scores
    ids = image_ids.unflatten(0, (number, size))
    positive = ids[:, :, None] == ids[:, None, :]
    rows = candidate_cross_entropy(logits, positive, valid)
    rows = rows + candidate_cross_entropy(logits.transpose(1, 2), positive, valid)
    return Loss(torch.where(valid, rows, 0).sum() / 2, valid.sum())
