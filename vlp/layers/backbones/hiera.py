"""Hiera's attention, whose tokens do not lie in the order of their rows and columns."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import register_notrace_module
from timm.models.hiera import Hiera, MaskUnitAttention
from torch import Tensor

from vlp.layers.backbones.attention import Positioned
from vlp.positions.base import PositionContext


@register_notrace_module
class PositionedMaskUnitAttention(Positioned, MaskUnitAttention):
    """Hiera's self-attention, within mask units or over the image, in raster order for encodings.

    `order` has the place in Hiera's order of each token of the grid, `reverse` the other way.
    """

    grid: tuple[int, int]
    order: Tensor
    reverse: Tensor

    def context(self, x: Tensor) -> PositionContext:
        """Return the grid of a mask unit, or of the image; x: (B, T, width)."""
        return PositionContext(self.grid)

    def attend(
        self,
        context: PositionContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *more: Any,
        **named: Any,
    ) -> Tensor:
        """Attention of (B, heads, T, head width) or (B, heads, mask units, T, head width).

        Raises:
            ValueError: mask units are left out of attention over the image.
        """
        if query.shape[-2] != len(self.order):
            raise ValueError(
                f"attention over the image has {query.shape[-2]} tokens, not {len(self.order)}: "
                "without all mask units nothing says where they lie"
            )
        query, key, value = (each[..., self.order, :] for each in (query, key, value))
        units = query.shape[2] if query.ndim == 5 else 0
        if units:
            query, key, value = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
        out = super().attend(context, query, key, value, *more, **named)
        out = out.unflatten(0, (-1, units)).transpose(1, 2) if units else out
        return out[..., self.reverse, :]


def hiera_layout(model: Hiera, block: int) -> tuple[tuple[int, int], Tensor]:
    """Return the grid that a block attends within, and the order of its tokens.

    Args:
        model: the Hiera.
        block: number of a block that pools no queries.

    Returns:
        (rows, columns) of a mask unit or of the image, and the place (rows * columns) in Hiera's
        order of each token in raster order.
    """
    attention: Any = model.blocks[block].attn
    _, size = model.reroll.schedule[block]
    tokens = int(size[0] * size[1])
    place = torch.arange(tokens, device="cpu")
    raster = model.reroll(place.view(1, tokens, 1), block)[0, ..., 0]  # (rows, columns)
    if attention.use_mask_unit_attn:
        units = tokens // attention.window_size
        own = raster % units == 0  # a mask unit is a rectangle
        raster = raster[own.any(1)][:, own.any(0)] // units
    return (int(raster.shape[0]), int(raster.shape[1])), raster.flatten()
