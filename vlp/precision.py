"""Computation in float32 or better, independent of a surrounding autocast."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor


def full_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert tensors of any shapes to their common dtype, float32 at least."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    return tuple(tensor.to(dtype) for tensor in tensors)


def at_least_float32(x: Tensor) -> Tensor:
    """Convert half precision and integers of any shape to float32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def no_autocast(tensor: Tensor) -> torch.autocast:
    """Return a context in which autocast is off on the tensor's device."""
    return torch.autocast(device_type=tensor.device.type, enabled=False)
