"""Random number generators keyed by (seed, epoch, sample, purpose)."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence


def make_rng(seed: int, epoch: int, sample: int | str, purpose: str) -> np.random.Generator:
    """Return the generator of a sample in an epoch for a purpose ("caption", "augment", ...).

    Equal arguments give equal numbers on every machine.
    """
    # The purpose is hashed: renaming a purpose changes the training.
    key = _Key(_hash(seed, epoch, sample, purpose, 16))
    # Philox takes any ISeedSequence, which numpy's annotations lack.
    return np.random.Generator(np.random.Philox(key))  # type: ignore[arg-type]


def stable_hash(*parts: int | str) -> int:
    """Return a non-negative 63-bit hash of `parts`."""
    return int.from_bytes(_hash(*parts, 8), "little") >> 1


class _Key(ISeedSequence):
    """Seed sequence that returns a hash unchanged."""

    # Not `Philox(key=...)`, which first draws an unused seed from the system: four times as slow.
    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        """Return the hash as `n_words` numbers, the same on every machine."""
        little_endian = np.dtype(dtype).newbyteorder("<")
        return np.frombuffer(self._digest, little_endian, n_words).astype(dtype)


def _hash(*parts: int | str) -> bytes:
    *key, size = parts
    # repr, as 1 and "1" differ, and ("a", "bc") and ("ab", "c").
    return hashlib.blake2b(repr(key).encode(), digest_size=int(size)).digest()
