"""Do anchors select? Numbers per channel group that training logs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vlp.distributed import global_sum


class AnchorStatistics(NamedTuple):
    """Per channel group, (G,) each, over real words of all ranks.

    `anchors`: share of (patch, word) entries with S >= threshold. `reachable`: share of entries
    with a path. `spread`: standard deviation of a word's path over its reachable patches, in units
    of Eq. 7, mean over words that reach at least two; near 0 the position says nothing.
    """

    anchors: Tensor
    reachable: Tensor
    spread: Tensor


@torch.no_grad()
def anchor_statistics(
    similarity: Tensor,
    threshold: Tensor | float,
    path: Tensor,
    reachable: Tensor,
    word_mask: Tensor,
    valid: Tensor | None = None,
) -> AnchorStatistics:
    """Compute statistics of Eqs 3-7 for a batch of pairs.

    `similarity`, `path` (B, M, N, G), `reachable` the same, bool, `word_mask` (B, N) bool,
    `valid` (B,) bool. Every rank must call it: one all-reduce of 5 x G sums.
    """
    if valid is not None:
        word_mask = word_mask & valid[:, None]
    return from_sums(global_sum(anchor_sums(similarity, threshold, path, reachable, word_mask)))


@torch.no_grad()
def anchor_sums(
    similarity: Tensor,
    threshold: Tensor | float,
    path: Tensor,
    reachable: Tensor,
    word_mask: Tensor,
) -> Tensor:
    """Compute the sums that `from_sums` takes, (5, G) float64; those of batches may be added."""
    words = word_mask[..., None]  # (B, N, 1)
    patches = similarity.shape[1]
    passing = (similarity >= threshold).sum(1)  # (B, N, G)
    reached = reachable.sum(1)
    path = torch.where(reachable, path, 0).double()
    mean = path.sum(1) / reached.clamp(min=1)
    squares = torch.where(reachable, (path - mean[:, None]).square(), 0).sum(1)
    deviation = (squares / reached.clamp(min=1)).sqrt()
    several = words & (reached >= 2)
    return torch.stack(
        [
            (passing * words).sum((0, 1)).double(),
            (reached * words).sum((0, 1)).double(),
            (words.expand_as(reached)).sum((0, 1)).double() * patches,
            torch.where(several, deviation, 0).sum((0, 1)),
            several.sum((0, 1)).double(),
        ]
    )


def from_sums(sums: Tensor) -> AnchorStatistics:
    """Return the statistics of everything in some sums (5, groups) of `anchor_sums`."""
    entries = sums[2].clamp(min=1)
    shares = AnchorStatistics(sums[0] / entries, sums[1] / entries, sums[3] / sums[4].clamp(min=1))
    return AnchorStatistics(*(share.float() for share in shares))
