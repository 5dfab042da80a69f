"""Batches on their way to a GPU, beside what it computes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from vlp.data.stream.batch import Slots


class CopyStream:
    """Moves batches to `device`, to a GPU on a stream of its own.

    The host is launches ahead of a GPU that it does not wait for, so the copy of a batch from
    pinned memory begins while the step before is still computed, and no batch need be fetched
    earlier for it. What is launched after it on the current stream waits for the copy. A batch
    that is no tuple, whose tensors cannot be found, is copied on the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def move(self, batch: Slots) -> Slots:
        """Return the batch with every tensor on the device."""
        if self._stream is None or not isinstance(batch, tuple):
            return batch.to(self._device)
        with torch.cuda.stream(self._stream):
            there = batch.to(self._device)
        reader = torch.cuda.current_stream(self._device)
        reader.wait_stream(self._stream)
        for leaf in tree_leaves(there):
            if isinstance(leaf, Tensor):
                leaf.record_stream(reader)  # its memory is free only after the reader's last use
        return there
