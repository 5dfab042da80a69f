"""Image-text matching: hard negatives inside fixed sample groups, and the matching loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp.compilation import region
from vlp.objectives.contrastive import related
from vlp.objectives.loss import Loss, sample_groups
from vlp.precision import full_precision


class Negatives(NamedTuple):
    """Row indices of K negatives for each row, (B K,) int64; the K of a row are adjacent.

    text_for_image: texts that do not match the row's image; image_for_text: images that do not
    match its text; has_text, has_image: (B K,) bool, False where no negative exists and the index
    is the row itself.
    """

    text_for_image: Tensor
    image_for_text: Tensor
    has_text: Tensor
    has_image: Tensor


@region
@torch.no_grad()
def hard_negatives(
    similarity_i2t: Tensor,
    pair_ids: Tensor,
    valid: Tensor,
    uniform: Tensor,
    group_size: int,
    count: int = 1,
) -> Negatives:
    """Sample negatives in proportion to softmax(similarity) within groups of rows.

    A negative is never an empty row, and never `related` to its row by image or caption.

    Args:
        similarity_i2t: (B, B) logits, divided by the temperature, images by texts.
        pair_ids: (B, 2) of images and captions, or (B,) of images.
        valid: (B,) bool, False = empty row.
        uniform: (B, 2) in [0, 1), for the inverse CDF in float64: column 0 samples the negative
            texts of images, column 1 the negative images of texts.
        group_size: rows of a group; `sample_groups` cuts them.
        count: K negatives of a row, a systematic sample at (u + k) / K of the CDF, so that a likely
            negative may occur twice.
    """
    rows = similarity_i2t.shape[0]
    number, size = sample_groups(rows, group_size)
    indices = torch.arange(rows, device=similarity_i2t.device)
    group_start = indices.unflatten(0, (number, size))[:, :1]
    # The diagonal blocks: negatives come from the row's group.
    blocks = similarity_i2t.unflatten(1, (number, size)).unflatten(0, (number, size))
    blocks = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).double()
    # Without ids of captions, texts of equal similarities count as one caption.
    if pair_ids.ndim == 1:
        captions = (
            torch.unique(similarity_i2t.T, dim=0, return_inverse=True)[1] if rows else pair_ids
        )
        pair_ids = torch.stack([pair_ids, captions], dim=1)
    ids, group_valid = pair_ids.unflatten(0, (number, size)), valid.unflatten(0, (number, size))
    allowed = ~related(ids, ids) & group_valid[:, :, None] & group_valid[:, None, :]

    steps = torch.arange(count, device=indices.device)
    indices = indices.repeat_interleave(count)

    def choose(logits: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
        # `allowed` is symmetric, so both directions have candidates in the same rows.
        has_negative = allowed.any(-1).flatten().repeat_interleave(count)
        points = (draw.unflatten(0, (number, size))[..., None] + steps) / count
        index = _inverse_cdf(logits, allowed, points) + group_start[..., None]
        return torch.where(has_negative, index.flatten(), indices), has_negative

    text, has_text = choose(blocks, uniform[:, 0].double())
    image, has_image = choose(blocks.transpose(1, 2), uniform[:, 1].double())
    return Negatives(text, image, has_text, has_image)


def _inverse_cdf(logits: Tensor, allowed: Tensor, draw: Tensor) -> Tensor:
    """Return the index of the first candidate with a CDF above `draw` (groups, R, K)."""
    lowest = torch.finfo(logits.dtype).min
    weight = logits.masked_fill(~allowed, lowest).softmax(-1).masked_fill(~allowed, 0)
    cumulative = weight.cumsum(-1)
    total = cumulative[..., -1:]
    # By rounding, a draw close to 1 could pass the last candidate of non-zero probability.
    point = torch.minimum(draw * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative.contiguous(), point.contiguous(), right=True)
    return index.clamp(max=logits.shape[-1] - 1)


@region
def itm_loss(logits: Tensor, labels: Tensor, mask: Tensor) -> Loss:
    """Compute the cross-entropy of logits (R, 2) and `labels` (R,), 1 = matched, 0 = not.

    mask: (R,) bool; other rows (an empty row, or no negative exists) are not counted.
    """
    (logits,) = full_precision(logits)
    rows = F.cross_entropy(logits, labels.to(torch.int64), reduction="none")
    return Loss(torch.where(mask, rows, 0).sum(), mask.sum())


@region
def listwise_itm_loss(positive: Tensor, negative: Tensor, mask: Tensor) -> Loss:
    """Compute the cross-entropy of each matching pair against its K negatives.

    positive: (R,) and negative: (R, K), log-odds of matching pairs and of their negatives; mask:
    (R,) bool, False = not counted.
    """
    positive, negative = full_precision(positive, negative)
    # Negatives are sampled by exp(similarity / temperature), so that at the optimum of this sampled
    # softmax log-odds + similarity / temperature is the log-probability of the match (Bengio and
    # Senecal 2008); re-ranking sorts by this sum.
    lists = torch.cat([positive[:, None], negative], dim=1)
    rows = lists.logsumexp(1) - positive
    return Loss(torch.where(mask, rows, 0).sum(), mask.sum())
