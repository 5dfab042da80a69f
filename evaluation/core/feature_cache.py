"""Encoder features of fixed blocks of images and captions, kept as far as memory allows.

Re-ranking needs every token state of an image or caption many times over. For a large set they
do not fit (5,000 images at 384 pixels are 9 GB), so a block that was dropped is encoded again,
whole, and therefore with exactly the same numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

GIBIBYTE = 2**30


class Block(NamedTuple):
    """`features` is what the encoder gave for the rows of one block."""

    features: Any
    extra: Any = None


Key = TypeVar("Key")


class BlockCache(Generic[Key]):
    """Least recently used blocks of at most `capacity` bytes; one block always fits."""

    def __init__(self, encode: Callable[[Key], Block], capacity: int) -> None:
        self._encode = encode
        self._capacity = capacity
        self._blocks: OrderedDict[Key, Block] = OrderedDict()
        self._bytes = 0

    def __getitem__(self, key: Key) -> Block:
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return self._blocks[key]
        block = self._encode(key)
        self._blocks[key] = block
        self._bytes += _size(block)
        while self._bytes > self._capacity and len(self._blocks) > 1:
            _, dropped = self._blocks.popitem(last=False)
            self._bytes -= _size(dropped)
        return block


def _size(block: Block) -> int:
    tensors = [field for field in block.features or () if isinstance(field, Tensor)]
    return sum(tensor.element_size() * tensor.nelement() for tensor in tensors)
