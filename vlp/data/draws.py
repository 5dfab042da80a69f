"""Random numbers that depend on what they are for, never on who asks or when."""

from __future__ import annotations

import hashlib

import numpy as np


def draw(seed: int, epoch: int, sample: int | str, purpose: str) -> np.random.Generator:
    """A generator of its own for one purpose ("caption", "augment", ...) of one sample's visit.

    Equal arguments give equal streams on every rank, worker and machine; Philox is counter-based,
    so its key can be the hash itself.
    """
    return np.random.Generator(np.random.Philox(key=_hash(seed, epoch, sample, purpose, 16)))


def identity(*parts: int | str) -> int:
    """A non-negative 63-bit number for what `parts` name."""
    return _hash(*parts, 8) >> 1


def _hash(*parts: int | str) -> int:
    *named, size = parts
    # repr keeps 1 and "1", and ("a", "bc") and ("ab", "c"), apart.
    digest = hashlib.blake2b(repr(named).encode(), digest_size=int(size)).digest()
    return int.from_bytes(digest, "little")
