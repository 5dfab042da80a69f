"""Batches of the training loop: their interface, and the batch of pretraining."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from vlp.data.image.transforms import MEAN, RGB, STD, normalise
from vlp.data.shards.sample_files import SkippedSample

AnyBatch = TypeVar("AnyBatch", bound=tuple)


class RankBatch(Protocol):
    """Interface of a rank's batch in the training loop; rows may be empty."""

    @property
    def valid(self) -> Tensor:
        """(B,) bool, False where the row is empty."""

    @property
    def skipped(self) -> tuple[SkippedSample, ...]:
        """The rank's bad samples."""

    def to(self, device: torch.device | str) -> RankBatch:
        """Move every tensor to `device`."""


def to_device(batch: AnyBatch, device: torch.device | str) -> AnyBatch:
    """Move all tensors of a named tuple, also in tuples of tensors, to `device`."""

    def move(field: Any) -> Any:
        if isinstance(field, Tensor):
            return field.to(device, non_blocking=True)
        if isinstance(field, tuple) and field and isinstance(field[0], Tensor):
            return tuple(move(part) for part in field)
        return field

    return type(batch)(*map(move, batch))


class Batch(NamedTuple):
    """One rank's rows of a global batch: B rows, N tokens, an H x W patch grid.

    Rows with `valid` False are empty. Random choices depend on (seed, epoch, sample, purpose), so
    rows do not depend on the number of ranks or workers.
    """

    # (B, 3, height, width), uint8 until `to` converts to float32 and normalises; or features
    # (B, T, C) of a frozen tower, float16 or bfloat16 until `to` converts to float32.
    pixels: Tensor
    text_ids: Tensor  # (B, N) int64
    attention_mask: Tensor  # (B, N) bool, True = not padding
    word_mask: Tensor  # (B, N) bool, False for [CLS], [SEP] and padding
    mlm_ids: Tensor  # (B, N) int64, text_ids with masked tokens
    mlm_labels: Tensor  # (B, N) int64, the original id where masked, else -100
    mim_mask: Tensor  # (B, H, W) bool, True = masked patch
    image_ids: Tensor  # (B,) int64, equal for captions of one image
    uniform: Tensor  # (B, 2) float64 in [0, 1) that draw the text's and the image's ITM negative
    valid: Tensor  # (B,) bool
    sample_ids: Tensor  # (B,) int64, independent of the number of ranks
    # (B, N, M) int8 of `text.word_boxes.word_patches`; None if images are augmented.
    word_patches: Tensor | None = None
    caption_ids: Tensor | None = None  # (B,) int64, equal for equal captions
    skipped: tuple[SkippedSample, ...] = ()
    statistics: tuple[RGB, RGB] = (MEAN, STD)  # mean and std of pixels, for `to`

    @property
    def pair_ids(self) -> Tensor:
        """Ids of image and caption, (B, 2); pairs that share an id are positives of each other."""
        captions = self.image_ids if self.caption_ids is None else self.caption_ids
        return torch.stack([self.image_ids, captions], dim=1)

    def without_padding(self) -> Batch:
        """Cut columns of padding after the longest text, which counts as two tokens at least."""
        longest = max(2, int(self.attention_mask.sum(1).amax()))
        patches = self.word_patches
        return self._replace(
            text_ids=self.text_ids[:, :longest],
            attention_mask=self.attention_mask[:, :longest],
            word_mask=self.word_mask[:, :longest],
            mlm_ids=self.mlm_ids[:, :longest],
            mlm_labels=self.mlm_labels[:, :longest],
            word_patches=None if patches is None else patches[:, :longest],
        )

    def to(self, device: torch.device | str) -> Batch:
        """Move tensors to `device`; convert pixels or features to float32 and normalise pixels."""
        batch = to_device(self, device)
        if batch.pixels.dtype != torch.uint8:
            return batch._replace(pixels=batch.pixels.float())
        return batch._replace(pixels=normalise(batch.pixels, *self.statistics))


class PatchMasking(NamedTuple):
    """Share of masked patches, masked in squares of `unit` x `unit` patches (SimMIM)."""

    ratio: float
    unit: int


class Inputs(NamedTuple):
    """Sizes of a model's inputs, and masking of its text and images."""

    image_size: int  # side in pixels
    grid: tuple[int, int]  # rows and columns of patches
    max_tokens: int  # of a caption, padded
    vocab_size: int  # rows of the token embedding
    word_masking: float | None = None  # probability of a token
    patch_masking: PatchMasking | None = None
    statistics: tuple[RGB, RGB] = (MEAN, STD)  # mean and std of pixels
