"""Choice of the attention kernel of timm's layers, by device."""

from __future__ import annotations

import torch
from torch import nn


def fuse_by_device(model: nn.Module, device: torch.device) -> None:
    """Fused attention on accelerators, explicit on CPU, where the fused backward pass is slow.

    Most of all in bf16: a whole training step takes 2.5 times as long with it.
    """
    fused = device.type != "cpu"
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused  # type: ignore[assignment]
