"""Masking of tokens (BERT) and of patches (SimMIM)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

IGNORE_INDEX = -100  # label of tokens without a loss, as in PyTorch's cross_entropy


def mask_words(
    text_ids: np.ndarray,
    word_mask: np.ndarray,
    probability: float,
    vocab_size: int,
    mask_id: int,
    special_ids: Sequence[int],
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Mask tokens of a caption as BERT: 80 % become [MASK], 10 % a random token, 10 % stay.

    `text_ids` and `word_mask` are (tokens,); at least one token is masked if there is a word.
    Returns the masked ids, and as labels the original ids of masked tokens, -100 elsewhere. Random
    tokens are never among `special_ids`.
    """
    count = len(text_ids)
    is_masked = word_mask & (rng.random(count) < probability)
    replacement = rng.random(count)  # below 0.8: [MASK], from 0.9 on: a random token
    ordinary_ids = _ordinary_ids(vocab_size, tuple(special_ids))
    random_ids = ordinary_ids[rng.integers(len(ordinary_ids), size=count)]
    words = np.flatnonzero(word_mask)
    fallback = rng.random()  # drawn even if unused, so that later draws stay the same
    if len(words) and not is_masked.any():
        is_masked[words[int(fallback * len(words))]] = True
    labels = np.where(is_masked, text_ids, IGNORE_INDEX)
    masked_ids = np.where(is_masked & (replacement < 0.8), mask_id, text_ids)
    masked_ids = np.where(is_masked & (replacement >= 0.9), random_ids, masked_ids)
    return masked_ids, labels


def mask_patches(
    grid: tuple[int, int], ratio: float, unit: int, rng: np.random.Generator
) -> np.ndarray:
    """Return (rows, columns) bool, True = masked: a share `ratio` of squares of `unit` patches."""
    rows, columns = -(-grid[0] // unit), -(-grid[1] // unit)
    squares = np.zeros(rows * columns, dtype=bool)
    squares[rng.permutation(rows * columns)[: math.ceil(rows * columns * ratio)]] = True
    patches = squares.reshape(rows, columns).repeat(unit, axis=0).repeat(unit, axis=1)
    return patches[: grid[0], : grid[1]]  # squares overhang the lower and right border


@lru_cache(maxsize=4)
def _ordinary_ids(vocab_size: int, special_ids: tuple[int, ...]) -> np.ndarray:
    return np.setdiff1d(np.arange(vocab_size), special_ids)
