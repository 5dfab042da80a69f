"""Paths of ACE-RPE of image-text pairs and their means, computed once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vlp.compilation import on_gpu, region
from vlp.positions.anchor import (
    Metric,
    anchor_distance,
    anchor_path,
    group_similarity,
    longest_path,
    mean_over_patches,
    mean_over_words,
)
from vlp.positions.anchor_attention import aligned_length
from vlp.precision import at_least_float32

# Path of a word and a patch that no anchor reaches: 0 or `longest_path`.
Unreachable = Literal["zero", "far"]


class PathSettings(NamedTuple):
    """Settings of the paths (Eqs 3-7), the same for every pair.

    Args:
        grid: (rows, columns) of the patches.
        threshold: delta of Eq. 4.
        groups: G, the channel groups of Eq. 3.
        text_window: B_t in tokens; None is unbounded.
        patch_window: B_p in patches; None is unbounded.
        metric: distance between patches.
        hard, tau: see `anchor_distance` (papers.md#ace-a8).
        with_alignment: also compute `AnchorPaths.alignment`.
        unreachable: path where no anchor is in the windows (papers.md#ace-a15).
    """

    grid: tuple[int, int]
    threshold: float | Tensor = 0.05
    groups: int = 8
    text_window: int | None = 5
    patch_window: int | None = 9
    metric: Metric = "euclidean"
    hard: bool = True
    tau: float = 1e4
    with_alignment: bool = True
    unreachable: Unreachable = "zero"


class AnchorPaths(NamedTuple):
    """Paths of B pairs, with a row of 0 for the image's [CLS].

    Args:
        image_path: paths by image token, (B, 1 + M, N, G), 0 where not reachable.
        text_path: the same paths by text token, (B, N, 1 + M, G).
        image_mean: mean over words (Eq. 10), (B, 1 + M, G).
        text_mean: mean over patches (Eq. 10), (B, N, G).
        alignment: mean of S over groups, (B, 1 + M, N), 0 for tokens that are no words; None
            without `PathSettings.with_alignment`.
        similarity: S of Eq. 3, (B, M, N, G), without a row for [CLS]; in float32 or better, where
            the other tensors have autocast's dtype.
    """

    image_path: Tensor
    text_path: Tensor
    image_mean: Tensor
    text_mean: Tensor
    alignment: Tensor | None
    similarity: Tensor

    def select_text(self, tokens: Tensor) -> AnchorPaths:
        """Select text tokens (B, Q) int64 as queries; `image_path` keeps all N tokens as keys."""

        def gather(x: Tensor) -> Tensor:
            index = tokens.view(*tokens.shape, *[1] * (x.ndim - 2))
            return x.gather(1, index.expand(-1, -1, *x.shape[2:]))

        # `mT`: the keys of `text_path` are contiguous in memory.
        return self._replace(
            text_path=gather(self.text_path.mT).mT,
            text_mean=gather(self.text_mean),
            alignment=None if self.alignment is None else gather(self.alignment.mT).mT,
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> AnchorPaths:
        """Apply a function to every tensor."""
        return AnchorPaths._make(None if part is None else function(part) for part in self)

    @property
    def reachable(self) -> Tensor:
        """Return whether a patch and a token have a path, (B, M, N, G) bool.

        All patches and words do with soft anchors, or with `unreachable` "far".
        """
        # A path is at least 1, the distance of an anchor of cosine 1.
        return self.image_path[:, 1:] > 0


@region
def compute_paths(
    image_tokens: Tensor, text_tokens: Tensor, word_mask: Tensor, settings: PathSettings
) -> AnchorPaths:
    """Compute the paths of a batch of pairs (Eqs 3-7, 10), in float32 or better.

    Args:
        image_tokens: (B, M, D) patch features without [CLS].
        text_tokens: (B, N, D) token features.
        word_mask: (B, N) bool, True = a real word; [CLS], [SEP] and padding are False and get no
            position (papers.md#ace-a25 and #ace-a31).
    """
    with torch.autocast(image_tokens.device.type, enabled=False):
        similarity = group_similarity(
            at_least_float32(image_tokens), at_least_float32(text_tokens), settings.groups
        )
    return paths_from_similarity(similarity, word_mask, settings)


def paths_from_similarity(
    similarity: Tensor, word_mask: Tensor, settings: PathSettings
) -> AnchorPaths:
    """Compute the paths of a batch of pairs (Eqs 4-7, 10) from S of Eq. 3, (B, M, N, G)."""
    grid, threshold = settings.grid, settings.threshold
    windows = settings.text_window, settings.patch_window, settings.metric
    with torch.autocast(similarity.device.type, enabled=False):
        distance = anchor_distance(similarity, threshold, settings.hard, settings.tau)
        path, reachable = anchor_path(distance, grid, word_mask, *windows)
        if settings.unreachable == "far":
            farthest = longest_path(threshold, grid, word_mask.shape[1], *windows)
            # Tokens that are no words keep a path of 0.
            path = torch.where(reachable | ~word_mask[:, None, :, None], path, farthest)
    return build_paths(path, similarity, word_mask, settings.with_alignment)


def join_paths(images: Sequence[AnchorPaths]) -> AnchorPaths:
    """Concatenate the paths of several images of one text along the image tokens.

    Each image keeps its [CLS] and its paths; a word's mean (Eq. 10) is over all images.
    """

    def join(tensors: Sequence[Tensor], dim: int) -> Tensor:
        # Keys stay contiguous in memory, as `build_paths` leaves them.
        return torch.cat([tensor.transpose(2, 3) for tensor in tensors], dim=dim).transpose(2, 3)

    alignments = [image.alignment for image in images if image.alignment is not None]
    return AnchorPaths(
        image_path=join([image.image_path for image in images], 1),
        text_path=join([image.text_path for image in images], -1),
        image_mean=torch.cat([image.image_mean for image in images], dim=1),
        text_mean=torch.stack([image.text_mean for image in images]).mean(0),
        alignment=torch.cat(alignments, dim=1) if alignments else None,
        similarity=torch.cat([image.similarity for image in images], dim=1),
    )


def uniform_paths(word_mask: Tensor, patches: int, groups: int) -> AnchorPaths:
    """Return paths of 1 between all words and patches, the baseline `uniform` (papers.md#ace-a26).

    word_mask: (B, N) bool, True = a real word.
    """
    path = word_mask[:, None, :, None].expand(-1, patches, -1, groups).float()
    return build_paths(path, path, word_mask)


def build_paths(
    path: Tensor, similarity: Tensor, word_mask: Tensor, with_alignment: bool = True
) -> AnchorPaths:
    """Add the averages of Eq. 10 and a zero row for the image's [CLS] (papers.md#ace-a25).

    Args:
        path: (B, M, N, G), patches without [CLS].
        similarity: S of Eq. 3, (B, M, N, G).
        word_mask: (B, N) bool, True = a real word.
        with_alignment: also compute the alignment.
    """
    pairs, patches, tokens, groups = path.shape
    dtype = _compute_dtype(path)
    compute_path = path.to(dtype)
    # The keys of each direction are contiguous in memory, as its attention reads them.
    text_path = _empty_rows(compute_path, pairs, tokens, groups, 1 + patches)
    text_path[..., 0] = 0
    text_path[..., 1:] = compute_path.permute(0, 2, 3, 1)
    image_path = _empty_rows(compute_path, pairs, 1 + patches, groups, tokens)
    image_path.copy_(text_path.permute(0, 3, 2, 1))
    alignment = None
    if with_alignment:
        alignment = similarity.mean(-1) * word_mask[:, None]
        alignment = functional.pad(alignment, (0, 0, 1, 0)).to(dtype)
    return AnchorPaths(
        image_path=image_path.transpose(2, 3),
        text_path=text_path.transpose(2, 3),
        image_mean=functional.pad(mean_over_words(path, word_mask), (0, 0, 1, 0)).to(dtype),
        text_mean=mean_over_patches(path).to(dtype),
        alignment=alignment,
        similarity=similarity,
    )


def _empty_rows(like: Tensor, *shape: int) -> Tensor:
    # On a GPU rows are padded in memory, for vectorised loads of the kernel.
    keys = shape[-1]
    length = aligned_length(keys) if on_gpu(like) else keys
    return like.new_empty(*shape[:-1], length)[..., :keys]


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Return autocast's dtype, or without autocast that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
