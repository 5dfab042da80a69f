"""Image-text matching: hard negatives inside fixed sample groups, and the matching loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp.compilation import region
from vlp.objectives.contrastive import as_pairs, related
from vlp.objectives.loss import Loss, sample_groups
from vlp.precision import full_precision


class Negatives(NamedTuple):
    """Row indices of K negatives for each row, (B K,) int64; the K negatives of a row are adjacent.

    text_for_image: texts that do not match the row's image; image_for_text: images that do not
    match the row's text; exists: (B K,) bool, False where a row has no negatives in either
    direction and both indices are the row itself.
    """

    text_for_image: Tensor
    image_for_text: Tensor
    exists: Tensor


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

    A negative is never an empty row, and never `related` to its row.

    Args:
        similarity_i2t: (B, B) logits, divided by the temperature, images by texts.
        pair_ids: (B, 2) int64, ids of image and caption; or (B,) of images, where texts with equal
            similarities count as equal captions.
        valid: (B,) bool, False = empty row.
        uniform: (B, 2) in [0, 1), for the inverse CDF in float64: column 0 samples the negative
            texts of images, column 1 the negative images of texts.
        group_size: rows of a group of `sample_groups`.
        count: K negatives of a row, a systematic sample at (u + k) / K of the CDF, so that a likely
            negative may occur twice.
    """
    rows = similarity_i2t.shape[0]
    groups, size = sample_groups(rows, group_size)
    indices = torch.arange(rows, device=similarity_i2t.device)
    # The diagonal blocks (groups, size, size): negatives come from the row's group.
    logits = similarity_i2t.unflatten(1, (groups, size)).unflatten(0, (groups, size))
    logits = logits.diagonal(dim1=0, dim2=2).permute(2, 0, 1).double()
    if pair_ids.ndim == 1 and rows:
        captions = torch.unique(similarity_i2t, dim=1, return_inverse=True)[1]
        pair_ids = torch.stack([pair_ids, captions], dim=1)
    ids, group_valid = (x.unflatten(0, (groups, size)) for x in (as_pairs(pair_ids), valid))
    allowed = ~related(ids, ids) & group_valid[:, :, None] & group_valid[:, None, :]

    # Draws (groups, size, 2, K): direction, then the K points of the systematic sample.
    draws = uniform.double().unflatten(0, (groups, size))[..., None]
    draws = (draws + torch.arange(count, device=indices.device)) / count
    # (groups, size, K), indices within the group.
    text = _inverse_cdf(logits, allowed, draws[:, :, 0])
    image = _inverse_cdf(logits.transpose(1, 2), allowed, draws[:, :, 1])
    group_start = indices.unflatten(0, (groups, size))[:, :1, None]
    # `allowed` is symmetric, so both directions have negatives in the same rows.
    exists = allowed.any(-1).flatten().repeat_interleave(count)
    row_indices = indices.repeat_interleave(count)
    return Negatives(
        text_for_image=torch.where(exists, (text + group_start).flatten(), row_indices),
        image_for_text=torch.where(exists, (image + group_start).flatten(), row_indices),
        exists=exists,
    )


def _inverse_cdf(logits: Tensor, allowed: Tensor, draws: Tensor) -> Tensor:
    """Sample candidates of each row: logits (groups, R, C), draws (groups, R, K) -> as draws."""
    lowest = torch.finfo(logits.dtype).min
    probability = logits.masked_fill(~allowed, lowest).softmax(-1).masked_fill(~allowed, 0)
    cdf = probability.cumsum(-1)
    total = cdf[..., -1:]
    # By rounding, a draw close to 1 could pass the last candidate of non-zero probability.
    points = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cdf.contiguous(), points.contiguous(), right=True)
    return index.clamp(max=logits.shape[-1] - 1)


@region
def itm_loss(logits: Tensor, labels: Tensor, mask: Tensor) -> Loss:
    """Compute the cross-entropy of logits (R, 2) and `labels` (R,), 1 = matched, 0 = not.

    mask: (R,) bool, False = not counted, as an empty row or a row without negatives.
    """
    (logits,) = full_precision(logits)
    losses = F.cross_entropy(logits, labels.to(torch.int64), reduction="none")
    return Loss(torch.where(mask, losses, 0).sum(), mask.sum())


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
    losses = torch.cat([positive[:, None], negative], dim=1).logsumexp(1) - positive
    return Loss(torch.where(mask, losses, 0).sum(), mask.sum())
