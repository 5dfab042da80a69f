"""Masked language modelling, computed at masked tokens only."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp.compilation import region
from vlp.objectives.loss import Loss
from vlp.precision import full_precision

IGNORED = -100


def masked_positions(
    states: Tensor, labels: Tensor, valid: Tensor | None = None, num_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Select states (R, width) and labels (R,) of masked tokens.

    Args:
        states: (B, N, width).
        labels: (B, N) int64, -100 at tokens that are not masked.
        valid: (B,) bool; other rows are left out.
        num_rows: R as a constant, which needs no synchronisation: surplus rows are labelled -100,
            and surplus tokens left out. None: R is the number of masked tokens.
    """
    mask = labels != IGNORED
    if valid is not None:
        mask = mask & valid[:, None]
    if num_rows is None:
        return states[mask], labels[mask]
    return _first_positions(states, labels, mask, num_rows)


def masked_columns(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the masked tokens of each text, (B, Q) int64, and their labels (B, Q).

    Q is the maximum over texts, at least 1; texts with fewer masked tokens get other tokens, with
    label -100, at the end. labels: (B, N), as of `masked_positions`.
    """
    mask = labels != IGNORED
    longest = max(1, int(mask.sum(1).amax()))
    # A stable sort puts masked tokens first, in the order of the text.
    columns = mask.logical_not().sort(stable=True, dim=1).indices[:, :longest]
    return columns, labels.gather(1, columns)


@region
def _first_positions(
    states: Tensor, labels: Tensor, mask: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    positions = mask.flatten().nonzero_static(size=num_rows, fill_value=-1)[:, 0]
    targets = torch.where(positions < 0, IGNORED, labels.flatten()[positions])
    return states.flatten(0, 1)[positions], targets


def prediction_rows(positions: int, probability: float) -> int:
    """Return a number of masked tokens that is almost never exceeded among `positions` tokens."""
    # Eight standard deviations plus eight above the mean, rounded up to a multiple of eight.
    mean = positions * probability
    bound = mean + 8 * (mean * (1 - probability)) ** 0.5 + 8
    return min(positions, math.ceil(bound / 8) * 8)


class MLMHead(nn.Module):
    """BERT's prediction head: dense, GELU, LayerNorm, then the tied word embedding with a bias."""

    def __init__(
        self, width: int, vocab_size: int, epsilon: float = 1e-12, table_width: int | None = None
    ) -> None:
        super().__init__()
        self.dense = nn.Linear(width, table_width or width)
        self.norm = nn.LayerNorm(table_width or width, eps=epsilon)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        nn.init.normal_(self.dense.weight, std=0.02)
        nn.init.zeros_(self.dense.bias)

    def forward(self, states: Tensor, word_embedding: Tensor) -> Tensor:
        """Map states (..., width) to logits (..., vocabulary).

        word_embedding: (vocabulary, table_width), an argument so that its module alone owns it.
        """
        states = self.norm(F.gelu(self.dense(states)))
        return F.linear(states, word_embedding, self.bias)


@region
def mlm_loss(
    logits: Tensor, labels: Tensor, soft: Tensor | None = None, alpha: float = 0.0
) -> Loss:
    """Compute the cross-entropy at masked tokens (ALBEF, Eq. 7); counts tokens.

    logits: (R, vocabulary); labels: (R,), -100 = not counted; soft: (R, vocabulary), a teacher's
    prediction with rows that sum to 1; alpha: weight of `soft` in the target.
    """
    (logits,) = full_precision(logits)
    valid = labels != IGNORED
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    if soft is not None and alpha > 0:
        soft_rows = -(soft.to(logits.dtype) * logits.log_softmax(-1)).sum(-1)
        total = (1 - alpha) * total + alpha * torch.where(valid, soft_rows, 0).sum()
    return Loss(total, valid.sum())
