"""Computation in float32 or better, whatever autocast says around it."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor


def full_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Bring floating tensors to one type, float32 at least (float64 stays float64)."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    return tuple(tensor.to(dtype) for tensor in tensors)


def at_least_float32(x: Tensor) -> Tensor:
    """Bring half precision and integers of any shape to float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def no_autocast(tensor: Tensor) -> torch.autocast:
    """Keep the type of matrix products on a tensor's device within this context."""
    return torch.autocast(device_type=tensor.device.type, enabled=False)
