"""Masked language modelling, computed at the masked words alone."""

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
    states: Tensor, labels: Tensor, valid: Tensor | None = None, slots: int | None = None
) -> tuple[Tensor, Tensor]:
    """Select states and labels of masked tokens, (B, N, W), (B, N) -> (R, W), (R,).

    `labels` is -100 elsewhere; rows with `valid` (B,) False are left out. R is their number or
    `slots`: surplus slots are labelled -100, surplus tokens are left out.
    """
    # The decoder over the vocabulary then runs on 15 % of the words.
    mask = labels != IGNORED
    if valid is not None:
        mask = mask & valid[:, None]
    # A number of slots avoids a wait for the device.
    if slots is None:
        return states[mask], labels[mask]
    return _first_positions(states, labels, mask, slots)


def masked_columns(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Find the masked tokens of each text, (B, N) -> tokens (B, Q) int64 and their labels (B, Q).

    Q is the most that a text has, at least 1; rows of fewer end with other tokens, labelled -100.
    """
    mask = labels != IGNORED
    longest = max(1, int(mask.sum(1).amax()))
    # Stable: masked tokens first, in the order of the text.
    columns = mask.logical_not().sort(stable=True, dim=1).indices[:, :longest]
    return columns, labels.gather(1, columns)


@region
def _first_positions(
    states: Tensor, labels: Tensor, mask: Tensor, slots: int
) -> tuple[Tensor, Tensor]:
    positions = mask.flatten().nonzero_static(size=slots, fill_value=-1)[:, 0]
    targets = torch.where(positions < 0, IGNORED, labels.flatten()[positions])
    return states.flatten(0, 1)[positions], targets


def prediction_slots(positions: int, probability: float) -> int:
    """Return a number of slots that the masked of `positions` tokens practically never exceed."""
    # Eight standard deviations, and eight slots, above the mean.
    mean = positions * probability
    bound = mean + 8 * (mean * (1 - probability)) ** 0.5 + 8
    return min(positions, math.ceil(bound / 8) * 8)


class MLMHead(nn.Module):
    """BERT's prediction head: dense, GELU, LayerNorm, then the tied decoder with a bias."""

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
        """Compute logits, (..., W), (vocabulary, table_width) -> (..., vocabulary)."""
        # The word embedding is an argument, so that the head owns no second copy of it.
        states = self.norm(F.gelu(self.dense(states)))
        return F.linear(states, word_embedding, self.bias)


@region
def mlm_loss(
    logits: Tensor, labels: Tensor, soft: Tensor | None = None, alpha: float = 0.0
) -> Loss:
    """Compute the cross-entropy at masked tokens, (R, vocabulary) logits, (R,) labels.

    `soft` (R, vocabulary), rows that sum to 1, is the teacher's prediction and takes the share
    `alpha` of the target (ALBEF, Eq. 7). Labels of -100 count nowhere. Counts words.
    """
    (logits,) = full_precision(logits)
    valid = labels != IGNORED
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    if soft is not None and alpha > 0:
        soft_rows = -(soft.to(logits.dtype) * logits.log_softmax(-1)).sum(-1)
        total = (1 - alpha) * total + alpha * torch.where(valid, soft_rows, 0).sum()
    return Loss(total, valid.sum())
