"""What ACE-RPE knows about a batch of pairs: paths and their means, shared by all layers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vlp.positions.anchor import (
    Metric,
    anchor_distance,
    anchor_path,
    group_similarity,
    mean_over_patches,
    mean_over_words,
)


class AnchorField(NamedTuple):
    """Paths of B pairs; the image side counts its prefix token ([CLS]), whose rows are 0.

    path: (B, 1 + M, N, G), 0 where not reachable; image_mean: (B, 1 + M, G) and
    text_mean: (B, N, G), the averages of Eq. 10; similarity (B, M, N, G) and reachable
    (B, M, N, G) are kept for statistics. Paths are computed in float32 and then kept in the
    autocast type, in which every layer multiplies them.
    """

    path: Tensor
    image_mean: Tensor
    text_mean: Tensor
    similarity: Tensor
    reachable: Tensor


def anchor_field(
    image_tokens: Tensor,
    text_tokens: Tensor,
    word_mask: Tensor,
    grid: tuple[int, int],
    threshold: float | Tensor,
    groups: int = 8,
    text_window: int | None = 5,
    patch_window: int | None = 9,
    metric: Metric = "euclidean",
    hard: bool = True,
    tau: float = 1e4,
) -> AnchorField:
    """Eqs 3-7 and the averages of Eq. 10 for a batch of pairs, in float32 or better.

    Args:
        image_tokens: (B, M, D) patch features without [CLS].
        text_tokens: (B, N, D) token features.
        word_mask: (B, N) bool, True = a real word; [CLS], [SEP] and padding are False and get no
            position (readings A25 and A31).
        grid: (rows, columns) of the patches.
        threshold: delta of Eq. 4.
        groups: G.
        text_window: B_t in tokens.
        patch_window: B_p in patches.
        metric: patch distance.
        hard: only anchors are passed through; False is Eq. 4 with a finite tau (reading A8).
        tau: of the soft form.
    """
    with torch.autocast(image_tokens.device.type, enabled=False):
        similarity = group_similarity(_float(image_tokens), _float(text_tokens), groups)
        path, reachable = anchor_path(
            anchor_distance(similarity, threshold, hard, tau),
            grid,
            word_mask,
            text_window,
            patch_window,
            metric,
        )
    return with_prefix(path, similarity, reachable, word_mask)


def uniform_field(word_mask: Tensor, patches: int, groups: int) -> AnchorField:
    """The baseline 'uniform' (reading A26): P = 1 between every word and every patch."""
    reachable = word_mask[:, None, :, None].expand(-1, patches, -1, groups)
    path = reachable.float()
    return with_prefix(path, path, reachable, word_mask)


def with_prefix(
    path: Tensor, similarity: Tensor, reachable: Tensor, word_mask: Tensor
) -> AnchorField:
    """Add the averages of Eq. 10 and a zero row for the image's [CLS] (reading A25)."""
    return AnchorField(
        path=functional.pad(path.to(_compute_dtype(path)), (0, 0, 0, 0, 1, 0)),
        image_mean=functional.pad(mean_over_words(path, word_mask), (0, 0, 1, 0)),
        text_mean=mean_over_patches(path),
        similarity=similarity,
        reachable=reachable,
    )


def _compute_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _float(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
