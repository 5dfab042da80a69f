"""Bytes of activations that live at a time, by the two readings of what a GPU keeps."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

FUSED, WRITTEN = "fused", "as written"
# A GPU computes these again in the backward pass (`vlp.layers.blocks.contract`).
_RECOMPUTED = {aten.gelu.default, aten.relu.default, aten.silu.default}


class LiveMemory:
    """Count bytes of tensors that operations make, from their making to their end.

    Gradients of parameters leave the count when they arrive. *As written* has all tensors. *Fused*
    leaves out the results of activation functions, which a GPU does not keep.

    Attributes:
        now: bytes that live, by reading.
        kept: of them what the forward pass leaves to the backward pass, as `mark_forward` notes.
        peak: the most of them so far.
    """

    def __init__(self) -> None:
        self._held: dict[int, dict[str, int]] = {}
        self.now, self.kept, self.peak = (dict.fromkeys((FUSED, WRITTEN), 0) for _ in range(3))

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Count the results of one operation."""
        for result in tree_leaves(out):
            if isinstance(result, Tensor):
                self._add(result, func in _RECOMPUTED)

    def mark_forward(self) -> None:
        """Note that the forward pass has ended."""
        self.kept = dict(self.now)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Count neither these tensors, parameters and buffers, nor their gradients."""
        for tensor in tensors:
            self._held[tensor.untyped_storage()._cdata] = dict.fromkeys((FUSED, WRITTEN), 0)
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(self._forget)

    def _add(self, x: Tensor, unwritten: bool) -> None:
        storage = x.untyped_storage()
        if storage._cdata in self._held:
            return
        size = storage.nbytes()
        sizes = {FUSED: 0 if unwritten else size, WRITTEN: size}
        self._held[storage._cdata] = sizes
        weakref.finalize(storage, self._free, storage._cdata, sizes)
        for reading, bytes_ in sizes.items():
            self.now[reading] += bytes_
            self.peak[reading] = max(self.peak[reading], self.now[reading])

    def _free(self, key: int, sizes: dict[str, int]) -> None:
        if self._held.get(key) is sizes:
            del self._held[key]
            for reading, bytes_ in sizes.items():
                self.now[reading] -= bytes_

    def _forget(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        key = parameter.grad.untyped_storage()._cdata
        if key in self._held:
            self._free(key, self._held[key])
