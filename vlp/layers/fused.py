"""Choice of the attention kernel of timm's layers, by device."""

from __future__ import annotations

from torch import Tensor, nn

from vlp.compilation import off_cpu


def fuse_by_device(model: nn.Module, x: Tensor) -> None:
    """Fused attention on accelerators, explicit on CPU, where the fused backward pass is slow.

    Most of all in bf16: a whole training step takes 2.5 times as long with it. The device is that
    of a tensor `x` of any shape.
    """
    fused = off_cpu(x)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused  # type: ignore[assignment]
