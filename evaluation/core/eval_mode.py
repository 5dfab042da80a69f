"""A model on a device and in evaluation mode for as long as it is evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from vlp.distributed import default_device


@contextmanager
def evaluating(
    model: nn.Module, device: torch.device | str | None = None
) -> Iterator[torch.device]:
    """Move the model, put it into evaluation mode, and give the device; None is this rank's own.

    Afterwards every submodule is back in its own mode; the model stays where it is.
    """
    torch_device = torch.device(device) if device is not None else default_device()
    modes = [(module, module.training) for module in model.modules()]
    model.to(torch_device).eval()
    try:
        yield torch_device
    finally:
        for module, training in modes:
            module.training = training
