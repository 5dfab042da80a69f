"""Outputs of the encoders, as named tuples whose rows can be picked."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from vlp.positions.anchor_field import AnchorField


class ImageFeatures(NamedTuple):
    """states (B, 1 + M, width), [CLS] first; feature (B, d) and tokens (B, M, d) of unit length."""

    states: Tensor
    feature: Tensor
    tokens: Tensor

    def select(self, indices: Tensor) -> ImageFeatures:
        """Rows `indices` (int64 or bool)."""
        return ImageFeatures(*(field[indices] for field in self))


class TextFeatures(NamedTuple):
    """states (B, N, width), [CLS] first; feature (B, d) and tokens (B, N, d) of unit length.

    attention_mask and word_mask are (B, N) bool, True = real; the words are without [CLS], [SEP].
    """

    states: Tensor
    feature: Tensor
    tokens: Tensor
    attention_mask: Tensor
    word_mask: Tensor

    def select(self, indices: Tensor) -> TextFeatures:
        """Rows `indices` (int64 or bool)."""
        return TextFeatures(*(field[indices] for field in self))


class CrossFeatures(NamedTuple):
    """text (B, N, width), whose [CLS] is the joint representation (papers.md#ace-a29).

    image (B, 1 + M, width), or None where only the text stream was asked for; anchors: the paths
    of the pairs, or None without ACE-RPE; attention_mask (B, N) bool, True = no padding;
    token_score (B,) is a part of the match score, where the model has it.
    """

    text: Tensor
    image: Tensor | None
    anchors: AnchorField | None
    attention_mask: Tensor
    token_score: Tensor | None = None
