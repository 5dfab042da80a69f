"""A start at which an encoding leaves trained weights' function as it was."""

from __future__ import annotations

import torch
from torch import nn

from vlp.positions.modulator import Modulator
from vlp.positions.rotary_encoding import RotaryMixed


@torch.no_grad()
def zero_start(module: nn.Module) -> None:
    """Set to zero what silences each encoding in a module, and can still be trained from there.

    These are the last layer of MLPs on places (`fourier`, `mlp`, sinusoids with `mlp`) and the
    frequencies of `rope-mixed`. Most other tables start at zero by themselves. What has no
    parameter that would silence it stays as it is: `alibi-2d`, `rope-1d`, `rope-axial`, sinusoids
    without MLP, `object`; and `sape`, whose equal tables would never move.
    """
    for part in module.modules():
        if isinstance(part, Modulator):
            nn.init.zeros_(part.dense_out.weight)
            nn.init.zeros_(part.dense_out.bias)
        elif isinstance(part, RotaryMixed):
            part.frequency_table.zero_()
