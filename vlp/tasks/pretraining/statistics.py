"""Statistics of a step for the log, and the running quantile that is the anchor threshold."""

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

logger = logging.getLogger(__name__)


class AnchorStatistics(NamedTuple):
    """Statistics of the channel groups, (G,) float32 each, over real words."""

    # Share of (patch, word) entries with S >= threshold.
    anchors: Tensor
    # Share of entries with a path.
    reachable: Tensor
    # Standard deviation of a word's path over its reachable patches, in units of Eq. 7, mean over
    # words that reach at least two patches. Near 0 the path carries no position.
    spread: Tensor


@torch.no_grad()
def anchor_statistics(
    similarity: Tensor,
    threshold: Tensor | float,
    path: Tensor,
    reachable: Tensor,
    word_mask: Tensor,
    valid: Tensor,
) -> AnchorStatistics:
    """Compute statistics of ACE-RPE's Eqs 3-7 over the matching pairs of all ranks; collective.

    `similarity`, `path` and the mask `reachable` are (pairs B, patches M, words N, groups G), the
    masks `word_mask` (B, N) and `valid` (B,).
    """
    words = word_mask & valid[:, None]
    sums = anchor_sums(similarity, threshold, path, reachable, words)
    return statistics_of_sums(global_sum(sums))


@torch.no_grad()
def anchor_sums(
    similarity: Tensor,
    threshold: Tensor | float,
    path: Tensor,
    reachable: Tensor,
    word_mask: Tensor,
) -> Tensor:
    """Compute (5, G) float64 sums for `statistics_of_sums`; sums of batches may be added."""
    words = word_mask[..., None]  # (B, N, 1)
    patches = similarity.shape[1]
    anchor_count = (similarity >= threshold).sum(1)  # (B, N, G)
    reachable_count = reachable.sum(1)
    path = torch.where(reachable, path, 0).double()
    mean = path.sum(1) / reachable_count.clamp(min=1)
    squares = torch.where(reachable, (path - mean[:, None]).square(), 0).sum(1)
    deviation = (squares / reachable_count.clamp(min=1)).sqrt()
    has_spread = words & (reachable_count >= 2)
    return torch.stack(
        [  # in the order of `statistics_of_sums`
            (anchor_count * words).sum((0, 1)).double(),
            (reachable_count * words).sum((0, 1)).double(),
            (words.expand_as(reachable_count)).sum((0, 1)).double() * patches,
            torch.where(has_spread, deviation, 0).sum((0, 1)),
            has_spread.sum((0, 1)).double(),
        ]
    )


def statistics_of_sums(sums: Tensor) -> AnchorStatistics:
    """Compute the statistics from (5, G) sums of `anchor_sums`."""
    anchors, reachable, entries, spread, words_with_spread = sums
    entries = entries.clamp(min=1)
    means = (anchors / entries, reachable / entries, spread / words_with_spread.clamp(min=1))
    return AnchorStatistics(*(mean.float() for mean in means))


@torch.no_grad()
def token_cosine(tokens: Tensor, mask: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
    """Average the cosine between different tokens of a sample, over samples with two or more.

    1 means that all tokens of a sample have one direction; 0 is also the result without samples.
    `tokens` (B, M, D) need not be normalised; of the masks, `mask` is (B, M) and `valid` (B,).
    """
    (tokens,) = full_precision(tokens)
    if mask is None:
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    if valid is not None:
        mask = mask & valid[:, None]
    unit = F.normalize(tokens, dim=-1) * mask[..., None]
    count = mask.sum(-1)
    # |sum of unit tokens|^2 is the sum of the cosines of all pairs, pairs of equal tokens included.
    cosine_sum = unit.sum(1).square().sum(-1) - unit.square().sum((1, 2))
    has_pairs = count >= 2
    cosine = cosine_sum / (count * (count - 1)).clamp(min=1)
    return torch.where(has_pairs, cosine, 0).sum() / has_pairs.sum().clamp(min=1)


@torch.no_grad()
def feature_spread(features: Tensor, valid: Tensor | None = None) -> Tensor:
    """Compute the channel mean of unit features' standard deviation over the batch, times sqrt(d).

    Near 1 if directions are spread evenly, 0 if all samples have one direction (SimSiam, section
    4.1), and 0 for fewer than two samples. `features` (B, d) need not be normalised; the mask
    `valid` is (B,).
    """
    (features,) = full_precision(features)
    mask = torch.ones_like(features[:, :1], dtype=torch.bool) if valid is None else valid[:, None]
    count = mask.sum()
    unit = F.normalize(features, dim=-1)
    mean = torch.where(mask, unit, 0).sum(0) / count.clamp(min=1)
    variance = torch.where(mask, (unit - mean).square(), 0).sum(0) / count.clamp(min=1)
    return torch.where(count < 2, 0, variance.sqrt().mean() * features.shape[-1] ** 0.5)


# Collapsed runs reached token cosines of 1.00, other runs at most 0.80; at a spread of 0.1 features
# have 1 % of their variance.
MAX_COSINE, MIN_SPREAD = 0.95, 0.1
# First steps without a check, and bad checks in a row that give a warning.
GRACE_STEPS, PATIENCE = 200, 3


class CollapseMonitor:
    """Monitor that warns when token or global features have collapsed.

    A check is bad if a `...cosine...` is above `MAX_COSINE` or a `...spread...` below `MIN_SPREAD`;
    `PATIENCE` bad checks in a row give one warning.
    """

    def __init__(self) -> None:
        self._bad_checks: dict[str, int] = {}

    def check(self, step: int, statistics: Mapping[str, float]) -> None:
        """Warn of statistics with `PATIENCE` bad checks in a row, once."""
        # Features of untrained encoders look collapsed, too.
        if step < GRACE_STEPS:
            return
        for name, value in statistics.items():
            limit = self._exceeded_limit(name, value)
            count = self._bad_checks.get(name, 0) + 1 if limit else 0
            self._bad_checks[name] = count
            if count == PATIENCE:
                logger.warning(
                    f"step {step}: {name} is {value:.3f} ({limit}) for {count} checks in a row: "
                    "the representation has collapsed; look at the contrastive loss, its "
                    "temperature and learning rate"
                )

    def _exceeded_limit(self, name: str, value: float) -> str:
        if "cosine" in name and value > MAX_COSINE:
            return f"above {MAX_COSINE}"
        if "spread" in name and value < MIN_SPREAD:
            return f"below {MIN_SPREAD}"
        return ""


def step_statistics(step: Step, paths: AnchorPaths | None) -> dict[str, Tensor]:
    """Compute all statistics of a step with the `paths` of its matching pairs."""
    with record_function("pass/statistics"):
        statistics = {} if paths is None else _path_statistics(step, paths)
        return statistics | _feature_statistics(step) | _word_cosines(step)


def _path_statistics(step: Step, paths: AnchorPaths) -> dict[str, Tensor]:
    """Return `AnchorStatistics`, as means and by channel group, and the unclamped threshold."""
    threshold = step.model.anchor_threshold
    by_group = anchor_statistics(
        paths.similarity,
        step.model.path_settings.threshold,
        paths.image_path[:, 1:],
        paths.reachable,
        step.batch.word_mask,
        step.batch.valid,
    )
    statistics = {}
    for name, groups in by_group._asdict().items():
        statistics[f"anchor_{name}"] = groups.mean()
        statistics |= {f"anchor_{name}/{g}": groups[g] for g in range(len(groups))}
    return statistics | {"anchor_threshold": threshold.clone()}


def _feature_statistics(step: Step) -> dict[str, Tensor]:
    """Return the statistics that `CollapseMonitor` checks, and the temperature."""
    image, text, valid = step.image, step.text, step.batch.valid
    return {
        "image_token_cosine": token_cosine(image.tokens, valid=valid),
        "text_token_cosine": token_cosine(text.tokens, step.batch.word_mask, valid),
        "image_spread": feature_spread(image.feature, valid),
        "text_spread": feature_spread(text.feature, valid),
        "temperature": step.model.temperature().detach(),
    }


@torch.no_grad()
def _word_cosines(step: Step) -> dict[str, Tensor]:
    """Return the mean cosines of words with patches in their object's box, and in other boxes.

    The result is empty if augmentation moves patches; means are 0 if no caption has word boxes.
    """
    patches = step.batch.word_patches
    if patches is None:
        return {}
    with torch.autocast(patches.device.type, enabled=False):
        cosine = step.text.tokens @ step.image.tokens.transpose(1, 2)  # (B, N, M)
    masks = torch.stack([patches == code for code in (OWN, OTHER)])  # (2, B, N, M)
    sums = global_sum((cosine * masks).sum((1, 2, 3)))
    counts = global_sum(masks.sum((1, 2, 3)))
    same_object, other_object = sums / counts.clamp(min=1)
    return {"word_own_box": same_object, "word_other_box": other_object}


# Bins of the histogram over [-1, 1]: 5e-4 wide, far below the spread of the similarities.
BINS = 4000


@torch.no_grad()
def similarity_quantile(
    similarity: Tensor, word_mask: Tensor, valid: Tensor, quantile: float
) -> Tensor:
    """Compute the quantile of S over patches, real words and groups of the global batch.

    Every rank must call it. The result is 0-d float32, exact to 5e-4; NaN if no rank has a word.

    Args:
        similarity: (B, M, N, G) in [-1, 1], Eq. 3.
        word_mask: (B, N) bool, True = a real word.
        valid: (B,) bool, False = an empty row.
        quantile: in (0, 1).
    """
    # Ranks sum a histogram, so the result does not depend on their number.
    return _quantile(global_sum(_histogram(similarity, word_mask & valid[:, None])), quantile)


@region
def _quantile(counts: Tensor, quantile: float) -> Tensor:
    """Return the upper edge of the bin in which the quantile lies; NaN if all counts are 0."""
    total = counts.sum()
    below = (counts.cumsum(0) < quantile * total).sum()
    edge = (below + 1).to(torch.float32) / (BINS / 2) - 1
    return torch.where(total > 0, edge, torch.nan)


def _histogram(similarity: Tensor, word_mask: Tensor) -> Tensor:
    """Count entries of words in similarity (B, M, N, G): (BINS,) int64; word_mask: (B, N) bool."""
    by_token = similarity.transpose(1, 2)
    # Selecting the words saves a CPU work, but makes a GPU wait for their number.
    if on_gpu(similarity):
        return _gpu_histogram(by_token, word_mask)
    return torch.bincount(_bin_index(by_token[word_mask].flatten()), minlength=BINS)


@region
def _gpu_histogram(by_token: Tensor, word_mask: Tensor) -> Tensor:
    # `histc` ignores entries outside of its range, such as -1.
    index = _bin_index(by_token).float().masked_fill(~word_mask[..., None, None], -1)
    return index.histc(BINS, -0.5, BINS - 0.5).long()


def _bin_index(similarity: Tensor) -> Tensor:
    return ((similarity + 1) * (BINS / 2)).long().clamp(0, BINS - 1)


@torch.no_grad()
def update_threshold(
    threshold: Tensor,
    similarity: Tensor,
    word_mask: Tensor,
    valid: Tensor,
    quantile: float,
    momentum: float,
) -> None:
    """Update a 0-d threshold, in place, to the running mean of the quantiles of batches.

    A threshold that is not above 0, as at the start, becomes the batch's quantile; a batch without
    words changes nothing. Every rank must call it. Arguments as in `similarity_quantile`; momentum:
    weight of the previous mean.
    """
    batch_quantile = similarity_quantile(similarity, word_mask, valid, quantile)
    threshold.copy_(_running_mean(threshold, batch_quantile, momentum))


@region
def _running_mean(threshold: Tensor, batch_quantile: Tensor, momentum: float) -> Tensor:
    mean = torch.lerp(batch_quantile, threshold, momentum)
    updated = torch.where(threshold > 0, mean, batch_quantile)
    return torch.where(torch.isfinite(updated), updated, threshold)
