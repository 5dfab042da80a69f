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
    soft_target: Tensor | None = None,
    alpha: float = 0.0,
) -> Tensor:
    """Compute the cross-entropy of each row over its candidates, (..., R, K) -> (..., R).

    A row without a valid positive has the loss 0.

    Args:
        logits: (..., R, K).
        positive: (..., R, K) bool; a row's target is uniform over its positives.
        candidate_valid: (..., K) or (..., R, K) bool; other candidates are ignored.
        soft_target: (..., R, K), a teacher's probabilities; each row sums to 1.
        alpha: weight of `soft_target` in the target.
    """
    candidate_valid = torch.broadcast_to(
        candidate_valid if candidate_valid.dim() == logits.dim() else candidate_valid[..., None, :],
        logits.shape,
    )
    positive = positive & candidate_valid
    positive_count = positive.sum(-1, keepdim=True)
    target = positive.to(logits.dtype) / positive_count.clamp(min=1)
    if soft_target is not None and alpha > 0:
        mixture = (1 - alpha) * target + alpha * soft_target.to(logits.dtype)
        target = torch.where((positive_count > 0) & candidate_valid, mixture, 0)
    # Not -inf, as a row without valid candidates would have NaN gradients.
    log_sum = logits.masked_fill(~candidate_valid, torch.finfo(logits.dtype).min).logsumexp(-1)
    return target.sum(-1) * log_sum - (target * logits).sum(-1)


def positives(pair_ids: Tensor, candidate_ids: Tensor) -> Tensor:
    """Return whether row b and candidate k have the same image or equal captions: (..., B, K) bool.

    pair_ids: (..., B, 2), ids of image and caption; candidate_ids: (..., K, 2). Or (B,) and (K,),
    ids of images.
    """
    pair_ids, candidate_ids = as_pairs(pair_ids), as_pairs(candidate_ids)
    return (pair_ids[..., :, None, :] == candidate_ids[..., None, :, :]).any(-1)


def as_pairs(ids: Tensor) -> Tensor:
    """Return ids (..., B, 2) of image and caption; ids (B,) of images also serve as captions'."""
    return ids if ids.ndim > 1 else ids[:, None].expand(-1, 2)


def related(pair_ids: Tensor, candidate_ids: Tensor, links: Tensor | None = None) -> Tensor:
    """Return whether candidates are `positives` or match by way of a third row: (..., B, K) bool.

    If a third row pairs the image of row b with the caption of candidate k, or the caption of row b
    with the image of candidate k, the candidate is no negative.

    Args:
        pair_ids: (..., B, 2), ids of image and caption, or (B,) of images.
        candidate_ids: (..., K, 2), or (K,).
        links: (..., L, 2), the third rows; None: `pair_ids`. Memory grows with B K and L.
    """
    is_self = candidate_ids is pair_ids
    pair_ids, candidate_ids = as_pairs(pair_ids), as_pairs(candidate_ids)
    links = pair_ids if links is None else as_pairs(links)
    i2t = match_by_links(pair_ids, candidate_ids, links)
    t2i = i2t.mT if is_self else match_by_links(candidate_ids, pair_ids, links).mT
    return positives(pair_ids, candidate_ids) | i2t | t2i


def match_keys(pair_ids: Tensor, key_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return which keys are `positives`, and which match by way of a third key: (B, K) bool each.

    Both together are `related` with the keys as links, which takes ten times as long for a queue.
    pair_ids: (B, 2), ids of image and caption; key_ids: (K, 2).
    """
    images_and_captions = key_ids.T.contiguous()
    is_equal = pair_ids[..., None] == images_and_captions  # (B, 2, K)
    # First half: some key has key k's caption and row b's image. Second half: the reverse.
    ids = images_and_captions.flip(0)
    group = torch.searchsorted(ids.sort().values, ids)  # (2, K), the same for equal ids
    group[1].add_(len(key_ids))
    has_equal = torch.zeros_like(is_equal).flatten(1)
    has_equal.index_add_(1, group.flatten(), is_equal.flatten(1))
    return is_equal.any(1), has_equal[:, group].any(1)


def match_by_links(image_ids: Tensor, caption_ids: Tensor, links: Tensor) -> Tensor:
    """Return whether a row of `links` pairs image i with caption t: (..., I, T) bool.

    Args:
        image_ids: (..., I, 2), pair ids of rows with the images.
        caption_ids: (..., T, 2), pair ids of rows with the captions.
        links: (..., L, 2), ids of images and captions.
    """
    link_hashes = _pair_hash(links[..., 0], links[..., 1]).sort(-1).values
    pair_hashes = _pair_hash(image_ids[..., :, None, 0], caption_ids[..., None, :, 1])
    flat_hashes = pair_hashes.flatten(-2)
    index = torch.searchsorted(link_hashes, flat_hashes).clamp(max=link_hashes.shape[-1] - 1)
    return (link_hashes.gather(-1, index) == flat_hashes).view_as(pair_hashes)


def _pair_hash(image_ids: Tensor, caption_ids: Tensor) -> Tensor:
    # Products wrap around in int64. Different pairs almost never have equal hashes.
    return image_ids * _PAIR_HASH + caption_ids


@region
def itc_loss(
    image: Tensor,
    text: Tensor,
    image_candidates: Tensor,
    text_candidates: Tensor,
    positive: Tensor,
    temperature: Tensor | float,
    valid: Tensor,
    candidate_valid: Tensor,
    soft_targets: tuple[Tensor, Tensor] | None = None,
    alpha: float = 0.0,
) -> Loss:
    """Compute the mean of image-to-text and text-to-image cross-entropy (ALBEF, Eqs 1 and 6).

    `count` of the loss is the number of valid rows with a valid positive.

    Args:
        image, text: (B, d) of unit length.
        image_candidates, text_candidates: (K, d) of unit length; row k of both is a pair, and the B
            pairs are among them.
        positive: (B, K) bool; a row's target is uniform over its positives.
        temperature: divides the cosines.
        valid: (B,) bool; other rows, and rows without a valid positive, are not counted.
        candidate_valid: (K,) or (B, K) bool; other candidates are ignored.
        soft_targets: result of the function `soft_targets`, (B, K) each.
        alpha: weight of the soft targets.
    """
    positive = positive & candidate_valid
    valid = valid & positive.any(-1)
    soft_i2t, soft_t2i = soft_targets if soft_targets is not None else (None, None)
    logits_i2t, logits_t2i = _logits(image, text, image_candidates, text_candidates, temperature)
    loss_i2t = candidate_cross_entropy(logits_i2t, positive, candidate_valid, soft_i2t, alpha)
    loss_t2i = candidate_cross_entropy(logits_t2i, positive, candidate_valid, soft_t2i, alpha)
    return Loss(torch.where(valid, loss_i2t + loss_t2i, 0).sum() / 2, valid.sum())


@region
@torch.no_grad()
def soft_targets(
    image: Tensor,
    text: Tensor,
    image_candidates: Tensor,
    text_candidates: Tensor,
    temperature: Tensor | float,
    candidate_valid: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute a teacher's targets, image-to-text and text-to-image, (B, K) without gradient.

    They are the softmax of feature similarities over valid candidates (ALBEF, section 3.3).
    """
    logits_i2t, logits_t2i = _logits(image, text, image_candidates, text_candidates, temperature)
    lowest = torch.finfo(logits_i2t.dtype).min
    logits_i2t = logits_i2t.masked_fill(~candidate_valid, lowest)
    logits_t2i = logits_t2i.masked_fill(~candidate_valid, lowest)
    return logits_i2t.softmax(-1), logits_t2i.softmax(-1)


def _logits(
    image: Tensor,
    text: Tensor,
    image_candidates: Tensor,
    text_candidates: Tensor,
    temperature: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """Compute logits image-to-text and text-to-image, (B, K) each, in float32 or better."""
    image, text, image_candidates, text_candidates = full_precision(
        image, text, image_candidates, text_candidates
    )
    with no_autocast(image):
        return image @ text_candidates.T / temperature, text @ image_candidates.T / temperature


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

    `count` of the loss is the number of images, by which the paper divides. Every rank must call it
    with the same shapes. Gradients are right only if all ranks scale their loss by the same factor,
    as `vlp.objectives.loss.normalise` does.

    Args:
        image, text: (B, d) of unit length.
        pair_ids: see `positives`; `related` pairs that are no positives are ignored.
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
        total, scale_grad, bias_grad = (torch.zeros_like(bias) for _ in range(3))
        image_grad = torch.zeros_like(image)
        ring = [text, torch.zeros_like(text), pair_ids, valid.to(torch.uint8)]
        with no_autocast(image):
            for _ in range(world_size()):
                texts, text_grad, text_pair_ids, text_valid = ring
                cosines = image @ texts.T
                positive = positives(pair_ids, text_pair_ids)
                sign = torch.where(positive, 1.0, -1.0).to(image.dtype)
                margin = sign * (cosines * scale + bias)
                mask = valid[:, None] & (text_valid > 0)
                mask = mask & (positive | ~related(pair_ids, text_pair_ids, links))
                total += torch.where(mask, functional.softplus(-margin), 0).sum()
                logit_grad = torch.where(mask, -sign * torch.sigmoid(-margin), 0)
                image_grad += scale * (logit_grad @ texts)
                scale_grad += (logit_grad * cosines).sum()
                bias_grad += logit_grad.sum()
                text_grad = text_grad + scale * (logit_grad.T @ image)
                ring = ring_exchange([texts, text_grad, text_pair_ids, text_valid])
        # After a full round, ring[1] is the gradient of this rank's texts.
        ctx.save_for_backward(image_grad, ring[1], scale_grad, bias_grad)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *(grads[0] * input_grad for input_grad in ctx.saved_tensors), None, None, None
