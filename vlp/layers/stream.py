"""LayerNorms whose outputs, and with them residual streams, may be of half precision.

Autocast computes a LayerNorm in float32 and returns it so, and what is added to it stays float32.
`set_half_streams` has the norms here round their output to autocast's type: then states are half as
large wherever they are written, read and kept. Sums within a norm are float32 in either form.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class ResidualStream(nn.Module):
    """The place where a residual stream begins, and is rounded where it is to be."""

    rounded = False

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width), in autocast's type or as it was."""
        return x.to(torch.get_autocast_dtype(x.device.type)) if _rounds(self, x) else x


class LayerNorm(nn.LayerNorm):
    """PyTorch's, of (..., width), which may take and return autocast's type."""

    rounded = False

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        if not _rounds(self, x):
            return super().forward(x)
        kind = torch.get_autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            scale, shift = (p.to(kind) for p in (self.weight, self.bias))
            return functional.layer_norm(x.to(kind), self.normalized_shape, scale, shift, self.eps)


def set_half_streams(module: nn.Module, half: bool) -> None:
    """Choose what the streams of a module's encoders are under autocast: its type, or float32."""
    for part in module.modules():
        if isinstance(part, ResidualStream | LayerNorm):
            part.rounded = half


def _rounds(module: ResidualStream | LayerNorm, x: Tensor) -> bool:
    return module.rounded and torch.is_autocast_enabled(x.device.type)
