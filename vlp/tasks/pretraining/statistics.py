"""Statistics of a step that change no loss, and the running quantile of the anchor threshold."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from vlp.compilation import on_gpu, region
from vlp.data.text.word_boxes import OTHER, OWN
from vlp.distributed import global_sum
from vlp.positions.anchor_field import AnchorPaths
from vlp.precision import full_precision
from vlp.tasks.pretraining.objectives import Step


class AnchorStatistics(NamedTuple):
    """Per channel group, (G,) each, over real words of all ranks."""

    # Share of (patch, word) entries with S >= threshold.
    anchors: Tensor
    # Share of entries with a path.
    reachable: Tensor
    # Standard deviation of a word's path over its reachable patches, in units of Eq. 7, mean over
    # words that reach at least two; near 0 the position tells nothing.
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
    """Compute the sums that `from_sums` takes, (5, G) float64; sums of batches may be added."""
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


logger = logging.getLogger(__name__)


@torch.no_grad()
def token_cosine(tokens: Tensor, mask: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
    """Average the cosine between different tokens of one sample, a scalar; 1 when all are alike.

    `tokens` (B, M, D) of any length, `mask` (B, M) bool, `valid` (B,) bool. Mean over samples with
    at least two tokens, 0 without such samples.
    """
    (tokens,) = full_precision(tokens)
    if mask is None:
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    if valid is not None:
        mask = mask & valid[:, None]
    unit = F.normalize(tokens, dim=-1) * mask[..., None]
    number = mask.sum(-1)
    # All pairs at once: |sum of unit tokens|^2 is the sum of all cosines, with themselves included.
    others = unit.sum(1).square().sum(-1) - unit.square().sum((1, 2))
    several = number >= 2
    cosine = others / (number * (number - 1)).clamp(min=1)
    return torch.where(several, cosine, 0).sum() / several.sum().clamp(min=1)


@torch.no_grad()
def feature_spread(features: Tensor, valid: Tensor | None = None) -> Tensor:
    """Compute unit features' standard deviation over the batch, times sqrt(d), channel mean.

    `features` (B, d), `valid` (B,) bool -> scalar: near 1 when directions are spread evenly, 0 when
    all samples have one direction (SimSiam, section 4.1). 0 with fewer than two samples.
    """
    (features,) = full_precision(features)
    rows = torch.ones_like(features[:, :1], dtype=torch.bool) if valid is None else valid[:, None]
    number = rows.sum()
    unit = F.normalize(features, dim=-1)
    mean = torch.where(rows, unit, 0).sum(0) / number.clamp(min=1)
    variance = torch.where(rows, (unit - mean).square(), 0).sum(0) / number.clamp(min=1)
    return torch.where(number < 2, 0, variance.sqrt().mean() * features.shape[-1] ** 0.5)


class CollapseWatch:
    """Watch that warns once per number when tokens or global features stay dead.

    Names with `cosine` are dead above `max_cosine`, names with `spread` below `min_spread`;
    `patience` checks in a row raise the warning.
    """

    # Collapsed runs reached token cosines of 1.00, others 0.80 or less; a spread of 0.1 means that
    # features keep 1 % of their variance.

    def __init__(
        self,
        max_cosine: float = 0.95,
        min_spread: float = 0.1,
        grace_steps: int = 200,
        patience: int = 3,
    ) -> None:
        self.max_cosine = max_cosine
        self.min_spread = min_spread
        self.grace_steps = grace_steps
        self.patience = patience
        self._dead_checks: dict[str, int] = {}

    def check(self, step: int, statistics: Mapping[str, float]) -> list[str]:
        """Log a warning for each statistic that has just died, and return their names."""
        # Untrained encoders look dead, too.
        if step < self.grace_steps:
            return []
        warned = []
        for name, value in statistics.items():
            limit = self._crossed(name, value)
            count = self._dead_checks[name] = self._dead_checks.get(name, 0) + 1 if limit else 0
            if limit and count == self.patience:
                logger.warning(
                    "step %d: %s is %.3f (%s) for %d checks in a row: the representation has "
                    "collapsed; look at the contrastive loss, its temperature and learning rate",
                    *(step, name, value, limit, count),
                )
                warned.append(name)
        return warned

    def _crossed(self, name: str, value: float) -> str:
        if "cosine" in name and value > self.max_cosine:
            return f"above {self.max_cosine}"
        if "spread" in name and value < self.min_spread:
            return f"below {self.min_spread}"
        return ""


def watch(step: Step, anchors: AnchorPaths | None) -> dict[str, Tensor]:
    """Compute all statistics of a step from its outputs and its matching pairs' `anchors`."""
    with record_function("pass/statistics"):
        shares = {} if anchors is None else anchor_shares(step, anchors)
        return shares | collapse(step) | word_cosines(step)


def anchor_shares(step: Step, anchors: AnchorPaths) -> dict[str, Tensor]:
    """Measure how selective anchors are, as means and by channel group, and the threshold."""
    threshold = step.model.anchor_threshold
    shares = anchor_statistics(
        anchors.similarity,
        threshold.clamp(min=1e-3),
        anchors.image_path[:, 1:],
        anchors.reachable,
        step.batch.word_mask,
        step.batch.valid,
    )
    statistics = {}
    for name, groups in zip(shares._fields, shares):
        statistics[f"anchor_{name}"] = groups.mean()
        statistics |= {f"anchor_{name}/{g}": groups[g] for g in range(len(groups))}
    return statistics | {"anchor_threshold": threshold.clone()}


def collapse(step: Step) -> dict[str, Tensor]:
    """Measure how alike tokens and features are, and the temperature."""
    image, text, valid = step.image, step.text, step.batch.valid
    return {
        "image_token_cosine": token_cosine(image.tokens, valid=valid),
        "text_token_cosine": token_cosine(text.tokens, step.batch.word_mask, valid),
        "image_spread": feature_spread(image.feature, valid),
        "text_spread": feature_spread(text.feature, valid),
        "temperature": step.model.temperature().detach(),
    }


@torch.no_grad()
def word_cosines(step: Step) -> dict[str, Tensor]:
    """Measure a word's cosine with patches of its own box and of others; 0 without word boxes."""
    patches = step.batch.word_patches
    if patches is None:  # augmentation moves patches
        return {}
    with torch.autocast(patches.device.type, enabled=False):
        cosine = step.text.tokens @ step.image.tokens.transpose(1, 2)  # (B, N, M)
    masks = torch.stack([patches == code for code in (OWN, OTHER)])
    sums = global_sum((cosine * masks).sum((1, 2, 3)))
    counts = global_sum(masks.sum((1, 2, 3)))
    same_object, other_object = sums / counts.clamp(min=1)
    return {"word_own_box": same_object, "word_other_box": other_object}


# Over [-1, 1]: steps of 5e-4, far below the spread of the similarities.
BINS = 4000


@torch.no_grad()
def similarity_quantile(
    similarity: Tensor, word_mask: Tensor, valid: Tensor, quantile: float
) -> Tensor:
    """Compute the quantile of S over patches, real words and groups of the global batch.

    Every rank must call it.

    Args:
        similarity: (B, M, N, G) in [-1, 1], Eq. 3.
        word_mask: (B, N) bool, True = a real word.
        valid: (B,) bool, False = an empty row.
        quantile: in (0, 1).

    Returns:
        The threshold, 0-d float32, exact to 5e-4; NaN when no rank has a word.
    """
    # Ranks sum a histogram, so the result does not depend on their number.
    return _quantile(global_sum(_histogram(similarity, word_mask & valid[:, None])), quantile)


@region
def _quantile(counts: Tensor, quantile: float) -> Tensor:
    total = counts.sum()
    below = (counts.cumsum(0) < quantile * total).sum()
    edge = (below + 1).to(torch.float32) / (BINS / 2) - 1
    return torch.where(total > 0, edge, torch.nan)


def _histogram(similarity: Tensor, words: Tensor, on_device: bool | None = None) -> Tensor:
    """Count the entries (B, M, N, G) of words (B, N) in each bin, (BINS,) int64."""
    # A GPU would have to wait for the number of words; counting padding, too, costs more on a CPU.
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

    A threshold of 0 becomes the quantile, later ones are running means; a batch without words
    changes nothing. Every rank must call it. Shapes are as in `similarity_quantile`.
    """
    batch_quantile = similarity_quantile(similarity, word_mask, valid, quantile)
    threshold.copy_(_moved(threshold, batch_quantile, momentum))


@region
def _moved(threshold: Tensor, batch_quantile: Tensor, momentum: float) -> Tensor:
    moved = torch.lerp(batch_quantile, threshold, momentum)
    updated = torch.where(threshold > 0, moved, batch_quantile)
    return torch.where(torch.isfinite(updated), updated, threshold)
