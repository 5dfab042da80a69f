"""Requirements of the model and the objectives on the data, in plain numbers.

The data knows neither of them: a configuration says these numbers to both sides.
"""

from __future__ import annotations

from typing import NamedTuple

from vlp.data.image.transforms import MEAN, RGB, STD


class PatchMasking(NamedTuple):
    """Share of masked patches, in squares of `unit` patches a side (SimMIM)."""

    ratio: float
    unit: int


class Inputs(NamedTuple):
    """Sizes of a batch.

    image_size: side in pixels; grid: patches (rows, columns); max_tokens: tokens of a padded
    caption; vocab_size: rows of the model's word table; word_masking: probability that a word is
    masked, or None; patch_masking: or None; statistics: mean and deviation of pixel values.
    """

    image_size: int
    grid: tuple[int, int]
    max_tokens: int
    vocab_size: int
    word_masking: float | None = None
    patch_masking: PatchMasking | None = None
    statistics: tuple[RGB, RGB] = (MEAN, STD)
