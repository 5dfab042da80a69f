"""Zero initialisation, at which encodings leave a trained model's function unchanged."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from vlp.positions.fourier import FourierPosition
from vlp.positions.learned import LearnedBoxPosition, LearnedGridPosition, LearnedPosition
from vlp.positions.modulator import Modulator
from vlp.positions.rotary import RotaryMixed


@torch.no_grad()
def zero_start(module: nn.Module) -> None:
    """Set to zero those parameters of a module's encodings at which they have no effect but learn.

    These are the last layer of MLPs on positions (`fourier`, `mlp`, sinusoids with `mlp`), the
    projection of `fourier`, the tables of `learned-1d`, `learned-2d` and `learned-4d`, and the
    frequencies of `rope-mixed`. Most other tables start at zero anyway. Unchanged are encodings
    without such a parameter: `alibi-2d`, `rope-1d`, `rope-axial`, sinusoids without MLP, `fourier`
    without MLP and projection, `object`; and `sape`, where zero tables get no gradient.
    """
    for part in module.modules():
        parameters: Iterable[nn.Parameter] = ()
        if isinstance(part, Modulator):
            parameters = part.dense_out.parameters()
        elif isinstance(part, FourierPosition) and isinstance(part.modulator, nn.Linear):
            parameters = part.modulator.parameters()
        elif isinstance(part, LearnedPosition | LearnedGridPosition | LearnedBoxPosition):
            parameters = (getattr(part, table) for table in part.NO_WEIGHT_DECAY)
        elif isinstance(part, RotaryMixed):
            parameters = part.parameters()
        for parameter in parameters:
            nn.init.zeros_(parameter)
