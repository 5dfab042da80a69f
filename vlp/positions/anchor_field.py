"""Paths of ACE-RPE for a batch of pairs, and their means, shared by all layers."""

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

# Path of a word to a patch without an anchor in reach: 0, or `longest_path`.
Unreachable = Literal["zero", "far"]


class PathSettings(NamedTuple):
    """Settings of the paths (Eqs 3-7), the same for every pair.

    grid: (rows, columns) of the patches. threshold: delta of Eq. 4. groups: G, channel groups of
    Eq. 3. text_window: B_t in tokens, patch_window: B_p in patches; None is unbounded. metric:
    distance between patches. hard: only anchors pass; False is Eq. 4 with a finite tau
    (papers.md#ace-a8). aligned: also return `AnchorPaths.alignment`. unreachable: path where no
    anchor is in reach (papers.md#ace-a15).
    """

    grid: tuple[int, int]
    threshold: float | Tensor = 0.05
    groups: int = 8
    text_window: int | None = 5
    patch_window: int | None = 9
    metric: Metric = "euclidean"
    hard: bool = True
    tau: float = 1e4
    aligned: bool = True
    unreachable: Unreachable = "zero"


class AnchorPaths(NamedTuple):
    """Paths of B pairs; the image side counts its prefix token ([CLS]) with rows of 0.

    image_path (B, 1 + M, N, G) and text_path (B, N, 1 + M, G) hold the same values, 0 where not
    reachable. image_mean (B, 1 + M, G) and text_mean (B, N, G) are the averages of Eq. 10;
    alignment (B, 1 + M, N) is the mean over groups of S of Eq. 3, 0 for tokens that are no words,
    or None without `aligned`; similarity (B, M, N, G) is S. All but S are in the autocast type.
    """

    image_path: Tensor
    text_path: Tensor
    image_mean: Tensor
    text_mean: Tensor
    alignment: Tensor | None
    similarity: Tensor

    def select_text(self, tokens: Tensor) -> AnchorPaths:
        """Select text queries (B, Q) int64; `image_path` keeps all tokens as keys."""
        index = tokens[..., None]
        path_index = index[..., None].expand(-1, -1, *self.text_path.mT.shape[2:])
        return self._replace(
            text_path=self.text_path.mT.gather(1, path_index).mT,
            text_mean=self.text_mean.gather(1, index.expand(-1, -1, self.text_mean.shape[2])),
            alignment=None if self.alignment is None else _select_columns(self.alignment, index),
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> AnchorPaths:
        """Apply a function to every tensor."""
        return AnchorPaths._make(None if part is None else change(part) for part in self)

    @property
    def reachable(self) -> Tensor:
        """Return whether a token has a path to a patch, (B, M, N, G) bool.

        With soft anchors or an `unreachable` path every word has one to every patch.
        """
        # A path is at least 1, the distance of the most similar anchor.
        return self.image_path[:, 1:] > 0


def _select_columns(alignment: Tensor, index: Tensor) -> Tensor:
    return alignment.mT.gather(1, index.expand(-1, -1, alignment.shape[1])).mT


@region
def compute_paths(
    image_tokens: Tensor, text_tokens: Tensor, word_mask: Tensor, settings: PathSettings
) -> AnchorPaths:
    """Compute Eqs 3-7 and the averages of Eq. 10 for a batch of pairs, in float32 or better.

    Args:
        image_tokens: (B, M, D) patch features without [CLS].
        text_tokens: (B, N, D) token features.
        word_mask: (B, N) bool, True = a real word; [CLS], [SEP] and padding are False and get no
            position (papers.md#ace-a25 and #ace-a31).
    """
    with torch.autocast(image_tokens.device.type, enabled=False):
        similarity = group_similarity(_float(image_tokens), _float(text_tokens), settings.groups)
    return paths_from_similarity(similarity, word_mask, settings)


def paths_from_similarity(
    similarity: Tensor, word_mask: Tensor, settings: PathSettings
) -> AnchorPaths:
    """Compute Eqs 4-7 and the averages of Eq. 10 from S of Eq. 3, (B, M, N, G)."""
    grid, threshold = settings.grid, settings.threshold
    windows = settings.text_window, settings.patch_window, settings.metric
    with torch.autocast(similarity.device.type, enabled=False):
        distance = anchor_distance(similarity, threshold, settings.hard, settings.tau)
        path, reachable = anchor_path(distance, grid, word_mask, *windows)
        if settings.unreachable == "far":
            farthest = longest_path(threshold, grid, word_mask.shape[1], *windows)
            # Tokens that are no words keep a path of 0.
            path = torch.where(reachable | ~word_mask[:, None, :, None], path, farthest)
    return with_prefix(path, similarity, word_mask, settings.aligned)


def join_paths(images: Sequence[AnchorPaths]) -> AnchorPaths:
    """Concatenate the paths of several images of one text along the image tokens.

    Each image keeps its prefix token and its paths; a word's mean (Eq. 10) is over all images.
    """

    def join(tensors: Sequence[Tensor]) -> Tensor:
        # Side by side in memory as `with_prefix` leaves them.
        return torch.cat([tensor.transpose(2, 3) for tensor in tensors], dim=-1).transpose(2, 3)

    aligned = [image.alignment for image in images if image.alignment is not None]
    return AnchorPaths(
        image_path=torch.cat([x.image_path.transpose(2, 3) for x in images], dim=1).transpose(2, 3),
        text_path=join([image.text_path for image in images]),
        image_mean=torch.cat([image.image_mean for image in images], dim=1),
        text_mean=torch.stack([image.text_mean for image in images]).mean(0),
        alignment=torch.cat(aligned, dim=1) if aligned else None,
        similarity=torch.cat([image.similarity for image in images], dim=1),
    )


def uniform_paths(word_mask: Tensor, patches: int, groups: int) -> AnchorPaths:
    """Return the 'uniform' baseline, P = 1 (papers.md#ace-a26), for words (B, N)."""
    path = word_mask[:, None, :, None].expand(-1, patches, -1, groups).float()
    return with_prefix(path, path, word_mask)


def with_prefix(
    path: Tensor, similarity: Tensor, word_mask: Tensor, aligned: bool = True
) -> AnchorPaths:
    """Add the averages of Eq. 10 and a zero row for the image's [CLS] (papers.md#ace-a25).

    Args:
        path: (B, M, N, G), patches without [CLS].
        similarity: S_G of the same shape.
        word_mask: (B, N), True for words.
    """
    pairs, patches, words, groups = path.shape
    dtype = _compute_dtype(path)
    # Each direction has its keys side by side in memory, as its attention reads them.
    values = path.to(dtype)
    text_path = _rows(values, pairs, words, groups, 1 + patches)
    text_path[..., 0] = 0
    text_path[..., 1:] = values.permute(0, 2, 3, 1)
    image_path = _rows(values, pairs, 1 + patches, groups, words)
    image_path.copy_(text_path.permute(0, 3, 2, 1))
    alignment = None
    if aligned:
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


def _rows(like: Tensor, *shape: int) -> Tensor:
    # On a GPU rows begin where its kernel reads them faster.
    keys = shape[-1]
    end = aligned_length(keys) if on_gpu(like) else keys
    return like.new_empty(*shape[:-1], end)[..., :keys]


def _compute_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _float(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
