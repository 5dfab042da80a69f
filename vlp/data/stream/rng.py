"""Random number generators keyed by (seed, epoch, sample, purpose)."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence


def make_rng(seed: int, epoch: int, sample: int | str, purpose: str) -> np.random.Generator:
    """Return the generator of one purpose ("caption", "augment", ...) of a sample's visit.

    Equal arguments give equal streams on every machine.
    """
    # The purpose is hashed: renaming one changes the training.
    key = _Key(_hash(seed, epoch, sample, purpose, 16))
    # numpy's annotations forget that any ISeedSequence will do.
    return np.random.Generator(np.random.Philox(key))  # type: ignore[arg-type]


def stable_hash(*parts: int | str) -> int:
    """Return a non-negative 63-bit hash of `parts`."""
    return int.from_bytes(_hash(*parts, 8), "little") >> 1


class _Key(ISeedSequence):
    """Hash as Philox's key."""

    # `Philox(key=...)` first draws an unused seed from the system, three quarters of its time.
    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        """Return the hash as `n_words` numbers, read alike on every machine."""
        little_endian = np.dtype(dtype).newbyteorder("<")
        return np.frombuffer(self._digest, little_endian, n_words).astype(dtype)


def _hash(*parts: int | str) -> bytes:
    *key, size = parts
    # repr keeps 1 and "1", and ("a", "bc") and ("ab", "c"), apart.
    return hashlib.blake2b(repr(key).encode(), digest_size=int(size)).digest()
