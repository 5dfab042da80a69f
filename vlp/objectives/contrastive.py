"""Image-text contrastive losses: softmax (ITC) with queue and soft targets, sigmoid (SigLIP)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from vlp.compilation import region
from vlp.distributed import gather, ring_exchange, world_size
from vlp.objectives.loss import Loss
from vlp.precision import full_precision, no_autocast

# An odd number of 64 bits: the golden ratio's fraction, as in Fibonacci hashing.
_PAIR_HASH = -7046029254386353131


def candidate_cross_entropy(
    logits: Tensor,
    positive: Tensor,
    candidate_valid: Tensor,
    soft: Tensor | None = None,
    alpha: float = 0.0,
) -> Tensor:
    """Compute the cross-entropy of each row over its candidates, (..., R, K) -> (..., R).

    A row without a valid positive has the loss 0.

    Args:
        logits: (..., R, K).
        positive: (..., R, K) bool; the positives of a row share its target equally.
        candidate_valid: (..., K) or (..., R, K) bool; other candidates are ignored.
        soft: (..., R, K), a teacher's targets, rows that sum to 1.
        alpha: weight of `soft` in the target.
    """
    candidate_valid = torch.broadcast_to(
        candidate_valid if candidate_valid.dim() == logits.dim() else candidate_valid[..., None, :],
        logits.shape,
    )
    positive = positive & candidate_valid
    number = positive.sum(-1, keepdim=True)
    target = positive.to(logits.dtype) / number.clamp(min=1)
    if soft is not None and alpha > 0:
        mixed = (1 - alpha) * target + alpha * soft.to(logits.dtype)
        target = torch.where((number > 0) & candidate_valid, mixed, 0)
    # Not -inf, as a row without valid candidates would have NaN gradients.
    log_sum = logits.masked_fill(~candidate_valid, torch.finfo(logits.dtype).min).logsumexp(-1)
    return target.sum(-1) * log_sum - (target * logits).sum(-1)


def positives(pair_ids: Tensor, candidate_ids: Tensor) -> Tensor:
    """Find candidates that share an id with a row: (..., B, C), (..., K, C) -> (..., B, K) bool.

    Ids are (B,) of images, or (..., B, 2) of images and captions, so that captions of one image and
    equal captions of several images are positives.
    """
    if pair_ids.ndim == 1:
        return pair_ids[:, None] == candidate_ids
    return (pair_ids[..., :, None, :] == candidate_ids[..., None, :, :]).any(-1)


def related(pair_ids: Tensor, candidate_ids: Tensor, links: Tensor | None = None) -> Tensor:
    """Find the `positives`, and candidates that match by way of a third row: (..., B, K) bool.

    A caption of an image may come again with another image: in its row it is no negative of the
    first image.

    Args:
        pair_ids: (..., B, 2) of images and captions, or (B,) of images, which have no third rows.
        candidate_ids: (..., K, 2) or (K,).
        links: (..., L, 2), the third rows; None: `pair_ids`. Memory grows with B K and L.
    """
    is_positive = positives(pair_ids, candidate_ids)
    if pair_ids.ndim == 1:
        return is_positive
    links = pair_ids if links is None else links
    of_row = match_by_links(pair_ids, candidate_ids, links)
    is_self = candidate_ids is pair_ids
    of_candidate = of_row if is_self else match_by_links(candidate_ids, pair_ids, links)
    return is_positive | of_row | of_candidate.mT


def match_by_links(image_ids: Tensor, caption_ids: Tensor, links: Tensor) -> Tensor:
    """Return whether a row of `links` (..., L, 2) has an image and a caption: (..., I, T) bool.

    image_ids: (..., I, 2), pairs with the images; caption_ids: (..., T, 2), pairs with the
    captions.
    """
    linked = _pair_hash(links[..., 0], links[..., 1]).sort(-1).values
    pairs = _pair_hash(image_ids[..., :, None, 0], caption_ids[..., None, :, 1])
    flat = pairs.flatten(-2)
    index = torch.searchsorted(linked, flat).clamp(max=linked.shape[-1] - 1)
    return (linked.gather(-1, index) == flat).view_as(pairs)


def _pair_hash(image_ids: Tensor, caption_ids: Tensor) -> Tensor:
    # Products wrap around; equal hashes of different pairs are as good as impossible.
    return image_ids * _PAIR_HASH + caption_ids


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
    """Average image-to-text and text-to-image cross-entropy (ALBEF, Eqs 1 and 6); counts rows.

    Args:
        image, text: (B, d) of unit length.
        image_candidates, text_candidates: (K, d) of unit length; row k of both is a pair, and the B
            pairs are among them.
        positive: (B, K) bool; the positives of a row share its target.
        temperature: divides the cosines.
        valid: (B,) bool; other rows, and rows without a valid positive, are not counted.
        candidate_valid: (K,) or (B, K) bool; other candidates are ignored.
        soft_targets: of a teacher, (B, K) each, from `soft_targets`.
        alpha: weight of the soft targets.
    """
    if valid is None:
        valid = positive.new_ones(len(positive))
    if candidate_valid is None:
        candidate_valid = positive.new_ones(positive.shape[1])
    positive = positive & candidate_valid
    valid = valid & positive.any(-1)
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
    """Compute a teacher's targets, image-to-text and text-to-image, (B, K) without gradient.

    They are the softmax of feature similarities over valid candidates (ALBEF, section 3.3).
    """
    logits = _logits(image, text, image_candidates, text_candidates, temperature)
    if candidate_valid is not None:
        lowest = torch.finfo(logits[0].dtype).min
        logits = tuple(side.masked_fill(~candidate_valid, lowest) for side in logits)
    return logits[0].softmax(-1), logits[1].softmax(-1)


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
        return (image @ text_candidates.T / temperature, text @ image_candidates.T / temperature)


class LearnedBias(nn.Module):
    """Learned bias of SigLIP's logits, which starts low, as nearly all pairs are negative."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(start))

    def forward(self) -> Tensor:
        """Return the bias, a scalar."""
        # A new tensor, as sharded engines free the parameter after the call.
        return self.bias + 0


def sigmoid_loss(
    image: Tensor, text: Tensor, pair_ids: Tensor, valid: Tensor, temperature: Tensor, bias: Tensor
) -> Loss:
    """Compute SigLIP's loss over this rank's images and the texts of all ranks (Algorithm 1).

    Counts images, as the paper divides by their number. Every rank must call it with the same
    shapes. Gradients are right only if all ranks scale their loss by the same factor, as
    `vlp.objectives.loss.normalise` does.

    Args:
        image, text: (B, d) of unit length.
        pair_ids: see `positives`; pairs that are only `related` by a row of any rank are ignored.
        valid: (B,) bool; other rows are ignored.
        temperature, bias: logits are cosines / temperature + bias.
    """
    image, text, scale, bias = full_precision(image, text, 1 / temperature, bias)
    total: Tensor = _Ring.apply(image, text, scale, bias, pair_ids, gather(pair_ids), valid)
    return Loss(total, valid.sum())


class _Ring(torch.autograd.Function):
    # Texts travel from rank to rank with their gradients, so that a rank only needs logits (B, B).
    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        text: Tensor,
        scale: Tensor,
        bias: Tensor,
        pair_ids: Tensor,
        links: Tensor,
        valid: Tensor,
    ) -> Tensor:
        total, scale_gradient, bias_gradient = (torch.zeros_like(bias) for _ in range(3))
        image_gradient = torch.zeros_like(image)
        ring = [text, torch.zeros_like(text), pair_ids, valid.to(torch.uint8)]
        with no_autocast(image):
            for _ in range(world_size()):
                texts, text_gradient, ids, text_valid = ring
                cosines = image @ texts.T
                positive = positives(pair_ids, ids)
                sign = torch.where(positive, 1.0, -1.0).to(image.dtype)
                margin = sign * (cosines * scale + bias)
                mask = valid[:, None] & (text_valid > 0)
                mask = mask & (positive | ~related(pair_ids, ids, links))
                total += torch.where(mask, functional.softplus(-margin), 0).sum()
                logit_gradient = torch.where(mask, -sign * torch.sigmoid(-margin), 0)
                image_gradient += scale * (logit_gradient @ texts)
                scale_gradient += (logit_gradient * cosines).sum()
                bias_gradient += logit_gradient.sum()
                text_gradient = text_gradient + scale * (logit_gradient.T @ image)
                ring = ring_exchange([texts, text_gradient, ids, text_valid])
        ctx.save_for_backward(image_gradient, ring[1], scale_gradient, bias_gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *(gradients[0] * part for part in ctx.saved_tensors), None, None, None
