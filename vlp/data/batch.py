"""The tensors of one rank's share of a global batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Skip(NamedTuple):
    """A sample that could not be used: its slot stays empty and the run goes on."""

    kind: str
    where: str


class Batch(NamedTuple):
    """`slots` rows, of which those with `valid` False are empty and count nowhere.

    Every random choice in it was drawn from (seed, epoch, sample, purpose), so the rows do not
    depend on the number of ranks or workers. Shapes, with B slots, N tokens, an H x W patch grid:

    pixels (B, 3, height, width) float32, normalised; text_ids (B, N) int64; attention_mask (B, N)
    bool, True = not padding; word_mask (B, N) bool, True = a real word piece ([CLS], [SEP] and
    padding are False); mlm_ids (B, N) the masked text; mlm_labels (B, N) the original id where
    masked, else -100; mim_mask (B, H, W) bool, True = masked patch; image_ids (B,) int64, equal for
    captions of one picture; draws (B, 2) float64 in [0, 1), for the text's and the picture's ITM
    negative; valid (B,) bool; sample_ids (B,) int64, stable over ranks; word_patches (B, N, M)
    int8, what `vlp.data.named_words.named_patches` says, or None where augmentation moves places;
    skipped: this share's bad samples.
    """

    pixels: Tensor
    text_ids: Tensor
    attention_mask: Tensor
    word_mask: Tensor
    mlm_ids: Tensor
    mlm_labels: Tensor
    mim_mask: Tensor
    image_ids: Tensor
    draws: Tensor
    valid: Tensor
    sample_ids: Tensor
    word_patches: Tensor | None = None
    skipped: tuple[Skip, ...] = ()

    def to(self, device: torch.device | str) -> Batch:
        """Move every tensor to `device`."""
        moved = (
            field.to(device, non_blocking=True) if isinstance(field, Tensor) else field
            for field in self
        )
        return Batch(*moved)  # type: ignore[arg-type]
