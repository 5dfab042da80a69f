"""Masked language modelling, computed at masked tokens only."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp.compilation import region
from vlp.layers.blocks import NORM_EPS
from vlp.objectives.loss import Loss
from vlp.precision import full_precision

IGNORE_INDEX = -100


def select_masked(
    states: Tensor, labels: Tensor, valid: Tensor, max_masked: int | None = None
) -> tuple[Tensor, Tensor]:
    """Select states (R, width) and labels (R,) of masked tokens.

    Args:
        states: (B, N, width).
        labels: (B, N) int64, -100 at tokens that are not masked.
        valid: (B,) bool; other rows are left out.
        max_masked: R, fixed and so without a synchronisation: missing rows have label -100, surplus
            tokens are left out. None: R is the number of masked tokens.
    """
    mask = (labels != IGNORE_INDEX) & valid[:, None]
    if max_masked is None:
        return states[mask], labels[mask]
    return _select_first(states, labels, mask, max_masked)


def masked_columns(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the masked tokens of each text, (B, Q) int64, and their labels (B, Q).

    Q is the maximum over texts, at least 1; texts with fewer masked tokens get other tokens, with
    label -100, at the end. labels: (B, N), as of `select_masked`.
    """
    mask = labels != IGNORE_INDEX
    columns_per_text = max(1, int(mask.sum(1).amax()))
    # A stable sort puts masked tokens first, in the order of the text.
    columns = mask.logical_not().sort(stable=True, dim=1).indices[:, :columns_per_text]
    return columns, labels.gather(1, columns)


@region
def _select_first(
    states: Tensor, labels: Tensor, mask: Tensor, max_masked: int
) -> tuple[Tensor, Tensor]:
    positions = mask.flatten().nonzero_static(size=max_masked, fill_value=-1)[:, 0]
    targets = torch.where(positions < 0, IGNORE_INDEX, labels.flatten()[positions])
    return states.flatten(0, 1)[positions], targets


def masked_token_bound(tokens: int, probability: float) -> int:
    """Return a bound that the number of masked tokens among `tokens` almost never exceeds."""
    # Eight standard deviations plus eight above the mean, rounded up to a multiple of eight.
    mean = tokens * probability
    bound = mean + 8 * (mean * (1 - probability)) ** 0.5 + 8
    return min(tokens, math.ceil(bound / 8) * 8)


class MLMHead(nn.Module):
    """BERT's prediction head: dense, GELU, LayerNorm, then the tied word embedding with a bias."""

    def __init__(self, width: int, vocab_size: int, table_width: int | None = None) -> None:
        super().__init__()
        self.dense = nn.Linear(width, table_width or width)
        self.norm = nn.LayerNorm(table_width or width, eps=NORM_EPS)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        nn.init.normal_(self.dense.weight, std=0.02)
        nn.init.zeros_(self.dense.bias)

    def forward(self, states: Tensor, word_embedding: Tensor) -> Tensor:
        """Map states (..., width) to logits (..., vocabulary).

        word_embedding: (vocabulary, table_width); an argument, as the text encoder owns it.
        """
        states = self.norm(F.gelu(self.dense(states)))
        return F.linear(states, word_embedding, self.bias)


@region
def mlm_loss(
    logits: Tensor, labels: Tensor, soft_target: Tensor | None = None, alpha: float = 0.0
) -> Loss:
    """Compute the cross-entropy at masked tokens (ALBEF, Eq. 7); `count` is their number.

    logits: (R, vocabulary); labels: (R,), -100 = not counted; soft_target: (R, vocabulary), a
    teacher's probabilities; alpha: weight of `soft_target` in the target.
    """
    (logits,) = full_precision(logits)
    valid = labels != IGNORE_INDEX
    total = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    if soft_target is not None and alpha > 0:
        soft_losses = -(soft_target.to(logits.dtype) * logits.log_softmax(-1)).sum(-1)
        total = (1 - alpha) * total + alpha * torch.where(valid, soft_losses, 0).sum()
    return Loss(total, valid.sum())
