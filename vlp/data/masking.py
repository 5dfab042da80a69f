"""Masking of words and patches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

IGNORED = -100


def mask_words(
    text_ids: np.ndarray,
    word_mask: np.ndarray,
    probability: float,
    vocab_size: int,
    mask_id: int,
    special_ids: Sequence[int],
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Mask one caption as BERT (80 % [MASK], 10 % another token), at least one word if it has any.

    `text_ids` and `word_mask` are (tokens,). Returns the masked ids, and labels: the original id
    where chosen, -100 elsewhere. Random tokens are never `special_ids`.
    """
    count = len(text_ids)
    chosen = word_mask & (rng.random(count) < probability)
    kind = rng.random(count)
    ordinary = _ordinary(vocab_size, tuple(special_ids))
    random_words = ordinary[rng.integers(len(ordinary), size=count)]
    words = np.flatnonzero(word_mask)
    spare = rng.random()
    if len(words) and not chosen.any():
        chosen[words[int(spare * len(words))]] = True
    labels = np.where(chosen, text_ids, IGNORED)
    masked = np.where(chosen & (kind < 0.8), mask_id, text_ids)
    masked = np.where(chosen & (kind >= 0.9), random_words, masked)
    return masked, labels


def mask_patches(
    grid: tuple[int, int], ratio: float, unit: int, rng: np.random.Generator
) -> np.ndarray:
    """Return (rows, columns) bool, True = masked (SimMIM): a share of squares of side `unit`."""
    rows, columns = -(-grid[0] // unit), -(-grid[1] // unit)
    squares = np.zeros(rows * columns, dtype=bool)
    squares[rng.permutation(rows * columns)[: math.ceil(rows * columns * ratio)]] = True
    patches = squares.reshape(rows, columns).repeat(unit, axis=0).repeat(unit, axis=1)
    return patches[: grid[0], : grid[1]]  # squares are cut off at the lower and right border


@lru_cache(maxsize=4)
def _ordinary(vocab_size: int, special_ids: tuple[int, ...]) -> np.ndarray:
    return np.setdiff1d(np.arange(vocab_size), special_ids)
