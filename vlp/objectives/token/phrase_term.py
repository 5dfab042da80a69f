"""Words follow the neighbour that points best: a phrase points as one."""

from __future__ import annotations

import torch
from torch import Tensor

from vlp.compute.full_precision import full_precision, no_autocast
from vlp.compute.region import region
from vlp.objectives.loss import Loss

REACH = 2
"""Words this far apart can belong to one phrase."""
MARGIN = 0.2
"""Margin by which a neighbour must point better, in units of cosine."""
SCALE = 10.0
"""Inverse temperature of the softmax over patches."""


@region
def phrase_loss(
    image_tokens: Tensor, text_tokens: Tensor, word_mask: Tensor, valid: Tensor
) -> Loss:
    """Compute the cross-entropy between a word's attention to patches and its best neighbour's.

    A word points by sel_n = max_m s_mn - mean_m relu(s_mn). Its leader is the word at most `REACH`
    away that points best, and the loss of the word is

        relu(sel_leader - sel_n - MARGIN) * H(softmax_m(SCALE s_m,leader), softmax_m(SCALE s_mn)),

    where gradients reach only s_mn. "circle" in "a red circle" so learns to lie where "red" lies,
    which a text encoder can only do by reading which word stands beside which. The margin keeps
    words that point well from following others. No paper's term (docs/results/anchors.md).

    Args:
        image_tokens: (B, M, D), unit length.
        text_tokens: (B, N, D), unit length.
        word_mask: (B, N) bool, True = a real word.
        valid: (B,) bool; rows that are not count nowhere.

    Returns:
        The sum over words, whose number is the count.
    """
    image_tokens, text_tokens = full_precision(image_tokens, text_tokens)
    words = word_mask & valid[:, None]
    with no_autocast(text_tokens):
        similarity = text_tokens @ image_tokens.mT  # (B, N, M)
    with torch.no_grad():
        points = (similarity.amax(-1) - similarity.relu().mean(-1)).masked_fill(~words, -2.0)
        places = torch.arange(words.shape[1], device=words.device)
        distance = (places[:, None] - places).abs()
        near = (distance > 0) & (distance <= REACH)
        best, leader = points[:, None, :].masked_fill(~near, -2.0).max(-1)  # (B, N)
        target = (SCALE * similarity).softmax(-1)
        target = target.gather(1, leader[..., None].expand_as(target))
        weight = torch.where(words, (best - points - MARGIN).clamp(min=0), 0)
    each = -(target * (SCALE * similarity).log_softmax(-1)).sum(-1)
    return Loss((weight * each).sum(), words.sum())
