"""Which parameters of position encodings weight decay is not for."""

from __future__ import annotations

import re

from torch import nn

from vlp.positions.base import PositionEncoding

# Tables of every kind, with learned frequencies; Transformer-XL's two biases and prefix vector.
POSITION_PARAMETERS = re.compile(r"(^|[._])tables?(_[a-z]+)?([._]|$)|(^|\.)(u|v|prefix)$")


def without_decay(model: nn.Module) -> set[str]:
    """Names of the position encodings' tables and vectors in a model.

    iRPE's authors exempt theirs from weight decay (supplement 2), as those of mixed RoPE do; a
    table that is pulled to zero pulls all positions together. Matrices of MLPs and projections are
    weights like any others.
    """
    return {
        f"{place}.{name}".removeprefix(".")
        for place, module in model.named_modules()
        if isinstance(module, PositionEncoding)
        for name, _ in module.named_parameters()
        if POSITION_PARAMETERS.search(name)
    }
