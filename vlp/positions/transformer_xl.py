"""`transformer-xl`: projected sinusoids of the offset, and two global query biases."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from vlp.positions.base import PositionContext, cached_constant
from vlp.positions.clipped import ClippedPosition, Offsets, cached_ids, longest_offset
from vlp.positions.coordinates import require_grid_tokens
from vlp.positions.lookup import Lookup, products
from vlp.positions.sine import sinusoid


class TransformerXLPosition(ClippedPosition):
    """Relative positions of Transformer-XL (Dai et al. 2019), on images as iRPE compares them.

    On images s is the sinusoid of h(dy) * (2 reach + 1) + h(dx), the number that iRPE's product
    method gives a pair of offsets clipped by h (supplement 4, papers.md#irpe-i15); W^R absorbs a
    constant shift of the numbers, and the sinusoids' layout (papers.md#irpe-i17). By default W^R, u
    and v are the same for all heads, as in the paper, unlike in Transformer-XL. The paper does not
    state the width of s: by default it is the layer's, as in Transformer-XL.

    Offsets are clipped to the reach on each axis; a longer reach adds no parameters. Pairs with
    prefix tokens have a learned vector in place of s W^R (papers.md#irpe-i10).

    Args:
        offsets: "product"; "axes", concatenated sinusoids of dx and dy; or "raster".
        shared_heads: the same W^R, u and v for all heads.
        sinusoid_width: channels of s, even, for axes a multiple of 4; None: `width`.
        temperature, layout: see `vlp.positions.sine.sinusoid`.
    """

    NO_WEIGHT_DECAY = ("u", "v", "prefix")
    causal = True

    OFFSETS: ClassVar[tuple[Offsets, ...]] = ("product", "axes", "raster")

    def __init__(
        self,
        width: int,
        heads: int,
        grid: tuple[int, int] | None = None,
        offsets: Offsets = "product",
        reach: int | None = 3,
        shared_heads: bool = True,
        prefix_bucket: bool = True,
        sinusoid_width: int | None = None,
        temperature: float = 10_000.0,
        layout: str = "halves",
    ) -> None:
        # The paper's text disagrees with its Table 5, where 4,828M operations imply all 27 x 27
        # offsets of 14 x 14 patches, a reach of 13. The default follows the text.
        super().__init__(
            "transformer-xl", width, heads, grid, offsets, reach, shared_heads, prefix_bucket
        )
        channels = width if sinusoid_width is None else sinusoid_width
        parts = 4 if offsets == "axes" else 2
        if channels < 1 or channels % parts:
            raise ValueError(
                f"transformer-xl: sinusoids of {offsets} need a multiple of {parts} channels, not "
                f"{channels}"
            )
        # Raises for impossible options.
        sinusoid(torch.zeros(1), channels, temperature, layout)
        self.temperature, self.layout = temperature, layout
        vector_shape = self.table_heads, 1, self.head_width
        # At zero the layer's function is unchanged.
        self.projection = nn.Parameter(torch.zeros(self.table_heads, channels, self.head_width))
        self.u = nn.Parameter(torch.zeros(vector_shape))
        self.v = nn.Parameter(torch.zeros(vector_shape))
        self.prefix = nn.Parameter(torch.zeros(vector_shape)) if prefix_bucket else None

    def lookups(self, query: Tensor, key: Tensor, context: PositionContext) -> list[Lookup]:
        """Return the terms of Eq. 10: (u . k_j + (q_i + v) . r_ij) / sqrt(head width)."""
        grid = require_grid_tokens(
            self.name, context, self.grid, query.shape[-2], key.shape[-2], self.prefix_bucket
        )
        # Offsets that this grid lacks are not projected.
        reach = min(self.reach, longest_offset(self.offsets, grid))
        ids = cached_ids(query.device, self.offsets, *grid, reach, context.prefix_tokens)
        relative = self._relative(reach)
        if self.offsets == "axes":
            ids = torch.stack([ids[0], ids[1] + relative.shape[1] // 2])
        content = key @ self.u.to(key.dtype).mT * self.scale
        return [
            Lookup(content, None, of_keys=True),
            products(query + self.v.to(query.dtype), relative, ids, self.scale),
        ]

    def _relative(self, reach: int) -> Tensor:
        """Return s W^R of every offset on a grid, (1 or heads, rows, head width).

        The prefix's row comes last. With axes there are two tables, vertical then horizontal, and
        the first table's prefix row is zero, as the rows of both are added.
        """
        channels = self.projection.shape[1]
        stride = 2 * self.reach + 1 if self.offsets == "product" else 0
        width = channels // 2 if self.offsets == "axes" else channels
        options = reach, width, stride, self.temperature, self.layout
        sinusoids = _cached_sinusoids(self.projection.device, self.projection.dtype, *options)
        prefix = [] if self.prefix is None else [self.prefix]
        if self.offsets != "axes":
            rows = sinusoids @ self.projection
            return torch.cat([rows.to(self.u.dtype), *prefix], 1)
        # In s dx comes first (papers.md#irpe-i16).
        projection_x, projection_y = self.projection.chunk(2, 1)
        zero = [torch.zeros_like(row) for row in prefix]
        parts = [sinusoids @ projection_y, *zero, sinusoids @ projection_x, *prefix]
        return torch.cat([part.to(self.u.dtype) for part in parts], 1)


@cached_constant(maxsize=32)
def _cached_sinusoids(
    device: torch.device,
    dtype: torch.dtype,
    reach: int,
    width: int,
    stride: int,
    temperature: float,
    layout: str,
) -> Tensor:
    """Return sinusoids of -reach..reach, or for a stride of dy * stride + dx for all pairs."""
    # Computed on the CPU in float64, so that they do not depend on the device.
    offsets = torch.arange(-reach, reach + 1, device="cpu")
    if stride:
        offsets = (offsets[:, None] * stride + offsets).flatten()
    return sinusoid(offsets.double(), width, temperature, layout).to(device, dtype)
