"""Zero initialisation, at which encodings leave a trained model's function as it was."""

from __future__ import annotations

import torch
from torch import nn

from vlp.positions.fourier import FourierPosition
from vlp.positions.learned import LearnedBoxPosition, LearnedGridPosition, LearnedPosition
from vlp.positions.modulator import Modulator
from vlp.positions.rotary import RotaryMixed


@torch.no_grad()
def zero_start(module: nn.Module) -> None:
    """Set to zero the parameters that silence encodings in a module and can be trained from there.

    These are the last layer of MLPs on positions (`fourier`, `mlp`, sinusoids with `mlp`), the
    projection of `fourier`, the tables of `learned-1d`, `learned-2d` and `learned-4d`, and the
    frequencies of `rope-mixed`. Most other tables start at zero. Without such a parameter an
    encoding stays as it is: `alibi-2d`, `rope-1d`, `rope-axial`, sinusoids without MLP, `fourier`
    without MLP and projection, `object`; and `sape`, where equal tables would never move.
    """
    for part in module.modules():
        if isinstance(part, Modulator):
            _silence(part.dense_out)
        elif isinstance(part, FourierPosition) and isinstance(part.modulator, nn.Linear):
            _silence(part.modulator)
        elif isinstance(part, LearnedPosition | LearnedGridPosition | LearnedBoxPosition):
            for table in part.NO_WEIGHT_DECAY:
                nn.init.zeros_(getattr(part, table))
        elif isinstance(part, RotaryMixed):
            part.frequency_table.zero_()


def _silence(layer: nn.Linear) -> None:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
