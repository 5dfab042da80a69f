"""Computation in float32 or better, independent of a surrounding autocast."""

from __future__ import annotations

from functools import reduce
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Values = TypeVar("Values", Tensor, NDArray[Any])


class NotFiniteError(ValueError):
    """Features, logits or scores that are NaN or infinite, which have no order."""


def require_finite(values: Values) -> Values:
    """Return features, logits or scores; raise NotFiniteError if any is NaN or infinite."""
    # `argmax` and `topk` of NaN would still return an index, and NaN has no rank.
    is_finite = values.isfinite() if isinstance(values, Tensor) else np.isfinite(values)
    if not bool(is_finite.all()):
        raise NotFiniteError(
            "the model returns features or scores that are not finite: try --precision float32; if "
            "that does not help, the weights are damaged"
        )
    return values


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
