"""Image-text contrastive loss over the batch's keys and a queue (ITC)."""

from __future__ import annotations

import torch
from torch import Tensor

from vlp.compute.full_precision import full_precision, no_autocast
from vlp.compute.region import region
from vlp.objectives.contrastive.cross_entropy import candidate_cross_entropy
from vlp.objectives.loss import Loss


def positives(image_ids: Tensor, candidate_image_ids: Tensor) -> Tensor:
    """Find pairs of the same image, (B,), (K,) -> (B, K) bool.

    Captions of one image are all right answers to it and never each other's negatives.
    """
    return image_ids[:, None] == candidate_image_ids[None, :]


@region
def itc_loss(
    image: Tensor,
    text: Tensor,
    image_candidates: Tensor,
    text_candidates: Tensor,
    positive: Tensor,
    temperature: Tensor | float,
    valid: Tensor | None = None,
    candidate_valid: Tensor | None = None,
    soft_targets: tuple[Tensor, Tensor] | None = None,
    alpha: float = 0.0,
) -> Loss:
    """Average image-to-text and text-to-image cross-entropy (ALBEF, Eqs 1 and 6).

    `image`, `text` (B, d) and the candidates (K, d) are unit length; candidate k is the pair
    (image key k, text key k), and the candidates include the rows' own pairs. `positive` (B, K)
    bool: the positives of a row share its target. Rows with `valid` (B,) False, or without a valid
    positive, count nowhere; candidates with `candidate_valid` (K,) False are no negatives.
    `soft_targets` (image-to-text, text-to-image), both (B, K) with rows that sum to 1, are the
    teacher's (see `soft_targets`); they take the share `alpha` of the target. Counts rows.
    """
    positive, valid, candidate_valid = _present(positive, valid, candidate_valid)
    soft_i2t, soft_t2i = soft_targets if soft_targets is not None else (None, None)
    image_logits, text_logits = _logits(image, text, image_candidates, text_candidates, temperature)
    rows = candidate_cross_entropy(image_logits, positive, candidate_valid, soft_i2t, alpha)
    rows = rows + candidate_cross_entropy(text_logits, positive, candidate_valid, soft_t2i, alpha)
    return Loss(torch.where(valid, rows, 0).sum() / 2, valid.sum())


@region
@torch.no_grad()
def soft_targets(
    image: Tensor,
    text: Tensor,
    image_candidates: Tensor,
    text_candidates: Tensor,
    temperature: Tensor | float,
    candidate_valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the teacher's targets: (image-to-text, text-to-image), (B, K), no gradient.

    All features are the teacher's; softmax of its similarities over the valid candidates (ALBEF,
    section 3.3).
    """
    logits = _logits(image, text, image_candidates, text_candidates, temperature)
    if candidate_valid is not None:
        lowest = torch.finfo(logits[0].dtype).min
        logits = tuple(side.masked_fill(~candidate_valid, lowest) for side in logits)
    return logits[0].softmax(-1), logits[1].softmax(-1)


def _present(
    positive: Tensor, valid: Tensor | None, candidate_valid: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    rows, candidates = positive.shape
    if valid is None:
        valid = positive.new_ones(rows)
    if candidate_valid is None:
        candidate_valid = positive.new_ones(candidates)
    positive = positive & candidate_valid
    return positive, valid & positive.any(-1), candidate_valid


def _logits(
    image: Tensor,
    text: Tensor,
    image_candidates: Tensor,
    text_candidates: Tensor,
    temperature: Tensor | float,
) -> tuple[Tensor, ...]:
    image, text, image_candidates, text_candidates = full_precision(
        image, text, image_candidates, text_candidates
    )
    with no_autocast(image):
        return (
            image @ text_candidates.T / temperature,
            text @ image_candidates.T / temperature,
        )
