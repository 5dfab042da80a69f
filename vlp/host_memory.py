"""Copies of tensors in the CPU's memory."""

from __future__ import annotations

import torch
from torch import Tensor


def host_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy, of any shape, that later changes of `tensor` do not reach.

    What comes from a GPU is pinned: it arrives at the full rate of the bus, and PyTorch keeps
    pinned memory that is freed for the next copy.
    """
    copy = torch.empty_like(
        tensor, device="cpu", memory_format=torch.contiguous_format, pin_memory=tensor.is_cuda
    )
    return copy.copy_(tensor)
