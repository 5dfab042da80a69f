"""Activation and linear layer of a feed-forward, of whose wide tensors one is kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from timm.layers.mlp import Mlp
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Layer = Callable[[Tensor], Tensor]


def contract(wide: Tensor, activation: Layer, linear: Layer) -> Tensor:
    """Compute linear(activation(wide)), (..., wide) -> (..., width).

    On a GPU the linear layer's input, beside `wide` the largest tensor of a block, is not kept for
    the backward pass, which computes it again. A compiler chooses by itself what it keeps.
    """
    active = activation(wide)
    if not active.is_cuda or torch.compiler.is_compiling():
        return linear(active)
    place = active.data_ptr()

    def pack(saved: Tensor) -> Tensor | torch.Size:
        return saved.shape if saved.data_ptr() == place else saved

    def unpack(kept: Tensor | torch.Size) -> Tensor:
        return kept if isinstance(kept, Tensor) else activation(wide).view(kept)

    with saved_tensors_hooks(pack, unpack):
        return linear(active)


class BlockMlp(Mlp):
    """The feed-forward of a timm block without dropout or norm in it, by `contract`."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        return contract(self.fc1(x), self.act, self.fc2)
