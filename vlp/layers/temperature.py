"""Learned scale and temperature of logits, with a bounded logarithm as the parameter."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from vlp.compilation import region


class _Bounded(torch.autograd.Function):
    """Clamp with a gradient that vanishes only where descent would leave the range."""

    # CLIP clamps the parameter, which a sharded optimiser (ZeRO-3) does not allow. A plain clamp in
    # the forward pass has no gradient that brings a value beyond the range back.

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(x <= low, x >= high)
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        at_low, at_high = ctx.saved_tensors
        gradient = gradients[0]
        outward = (at_low & (gradient > 0)) | (at_high & (gradient < 0))
        return gradient.masked_fill(outward, 0), None, None


@region
def _bounded_exp(x: Tensor, low: float, high: float) -> Tensor:
    return _Bounded.apply(x, low, high).exp()


class LearnedScale(nn.Module):
    """Factor of logits in [1, 100], learned as its logarithm.

    The maximum is CLIP's (Radford et al. 2021, section 2.5).
    """

    low, high = 0.0, math.log(100.0)

    def __init__(self, start: float) -> None:
        super().__init__()
        if not 1 <= start <= 100:
            raise ValueError(f"a scale of {start} is not in [1, 100]")
        self.log_scale = nn.Parameter(torch.tensor(math.log(start), dtype=torch.float32))

    def forward(self) -> Tensor:
        """Return the scale, a scalar."""
        return _bounded_exp(self.log_scale, self.low, self.high)


class Temperature(LearnedScale):
    """Softmax temperature in [0.01, 1], learned as the logarithm of its inverse."""

    def __init__(self, start: float) -> None:
        super().__init__(1 / start)

    def forward(self) -> Tensor:
        """Return the temperature, a scalar."""
        return 1 / super().forward()
