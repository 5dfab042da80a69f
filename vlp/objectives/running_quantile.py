"""The anchor threshold as a quantile of similarities, the same on any number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from vlp.compilation import on_gpu, region
from vlp.distributed import global_sum

BINS = 4000  # over [-1, 1]: steps of 5e-4, far below the spread of the similarities


@torch.no_grad()
def similarity_quantile(
    similarity: Tensor, word_mask: Tensor, valid: Tensor, quantile: float
) -> Tensor:
    """Compute the quantile of S over patches, real words and groups of the global batch.

    A histogram is summed over ranks, so the result does not depend on how many there are. Every
    rank must call it.

    Args:
        similarity: (B, M, N, G) in [-1, 1], Eq. 3.
        word_mask: (B, N) bool, True = a real word.
        valid: (B,) bool, False = an empty slot.
        quantile: in (0, 1).

    Returns:
        The threshold, 0-d float32, exact to 5e-4; NaN when no rank has a word.
    """
    return _quantile(global_sum(_histogram(similarity, word_mask & valid[:, None])), quantile)


@region
def _quantile(counts: Tensor, quantile: float) -> Tensor:
    total = counts.sum()
    below = (counts.cumsum(0) < quantile * total).sum()
    edge = (below + 1).to(torch.float32) / (BINS / 2) - 1
    return torch.where(total > 0, edge, torch.nan)


def _histogram(similarity: Tensor, words: Tensor, on_device: bool | None = None) -> Tensor:
    """Count the entries (B, M, N, G) of words (B, N) in each bin, (BINS,) int64.

    The form for a GPU (`on_device`, None: by the tensors' place) reads no number from it; on a CPU
    it costs more, because padding is counted too.
    """
    by_word = similarity.transpose(1, 2)
    if on_gpu(similarity) if on_device is None else on_device:
        return _histogram_unread(by_word, words)
    return torch.bincount(_bin(by_word[words].flatten()), minlength=BINS)


@region
def _histogram_unread(by_word: Tensor, words: Tensor) -> Tensor:
    index = _bin(by_word).float().masked_fill(~words[..., None, None], -1)
    return index.histc(BINS, -0.5, BINS - 0.5).long()


def _bin(entries: Tensor) -> Tensor:
    return ((entries + 1) * (BINS / 2)).long().clamp(0, BINS - 1)


@torch.no_grad()
def move_threshold(
    threshold: Tensor,
    similarity: Tensor,
    word_mask: Tensor,
    valid: Tensor,
    quantile: float,
    momentum: float,
) -> None:
    """Move a 0-d threshold, in place, towards the quantile of a batch (`similarity_quantile`).

    Its first value, in place of 0, is the quantile itself; later ones are running means. A batch
    without words leaves it as it is. Every rank must call it. Shapes are those of
    `similarity_quantile`.
    """
    now = similarity_quantile(similarity, word_mask, valid, quantile)
    threshold.copy_(_moved(threshold, now, momentum))


@region
def _moved(threshold: Tensor, now: Tensor, momentum: float) -> Tensor:
    moved = torch.lerp(now, threshold, momentum)
    new = torch.where(threshold > 0, moved, now)
    return torch.where(torch.isfinite(new), new, threshold)
