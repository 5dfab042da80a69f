"""ViTARC's 2D-RPE: a bias of minus slope times Manhattan distance, with two slopes per head."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from vlp.positions.base import PositionContext, PositionEncoding, cached_constant
from vlp.positions.coordinates import require_grid_tokens, require_patches
from vlp.positions.options import require_choice

Ratio = Literal["paper", "code"]
Variant = Literal["two-slope", "four-diagonal"]


def slopes(heads: int, ratio: Ratio = "paper") -> Tensor:
    """Return slopes r_left, r_right (ViTARC, Eq. 12, papers.md#vitarc-v2), (2, heads) float64.

    Geometric sequences that start at 2^-1 (left) and 2^-0.5 (right), with ratio 2^(-8/heads)
    ("paper") or 1/2 ("code"); both are equal for eight heads, the authors' number.
    """
    if heads < 1:
        raise ValueError(f"alibi-2d needs at least one head, not {heads}")
    require_choice("alibi-2d ratio", ratio, get_args(Ratio))
    if ratio == "paper":
        exponents = [8 * head / heads for head in range(heads)]
    else:
        # Heads beyond a power of two repeat every second slope, as in the authors' code.
        power = 2 ** (heads.bit_length() - 1)
        exponents = [*range(power), *range(0, 2 * (heads - power), 2)]
    # Not on a default device `meta`, which has no numbers.
    head_exponents = torch.tensor(exponents, dtype=torch.float64, device="cpu")
    side_exponents = torch.tensor([1.0, 0.5], dtype=torch.float64, device="cpu")
    return torch.exp2(-side_exponents[:, None] - head_exponents)


def bias(
    height: int, width: int, heads: int, ratio: Ratio = "paper", variant: Variant = "two-slope"
) -> Tensor:
    """Return minus slope times Manhattan distance for all pairs of patches (ViTARC Eqs 11, 12).

    The diagonal is 0 (papers.md#vitarc-v5). The bias is for scaled logits (papers.md#vitarc-v6).

    Args:
        ratio: see `slopes`.
        variant: "two-slope", Eq. 12, or "four-diagonal", as in the authors' training script
            (papers.md#vitarc-v4): keys to the right in other rows than the query's count as 2^0.25
            times as far, so that the four diagonal directions have different slopes.

    Returns:
        (heads, height * width, height * width) float64, query by key, not positive.
    """
    require_patches("alibi-2d", (height, width))
    require_choice("alibi-2d variant", variant, get_args(Variant))
    left, right = slopes(heads, ratio)[..., None, None]
    index = torch.arange(height * width, device=left.device)
    row, column = index // width, index % width
    row_offset, column_offset = row - row[:, None], column - column[:, None]
    # Eq. 11 prints plus, but the slope penalises distance (papers.md#vitarc-v1).
    penalty = -(row_offset.abs() + column_offset.abs()).double()
    if variant == "four-diagonal":
        penalty = torch.where((column_offset > 0) & (row_offset != 0), penalty * 2**0.25, penalty)
    # "Left" means not after the query in raster order: a key below and to the left has the right
    # slope (papers.md#vitarc-v3).
    return torch.where(index <= index[:, None], left, right) * penalty


class DirectionalDistance(PositionEncoding):
    """`alibi-2d`: the 2D-RPE of ViTARC (Eq. 12), a bias without parameters.

    Any grid works, also a larger one than in training. Pairs with prefix tokens have bias 0
    (papers.md#vitarc-v7). Attached to a trained model it changes the model's function.

    Args:
        heads: attention heads.
        grid: (rows, columns) where the context has no grid.
        ratio: see `slopes`.
        variant: see `bias`.
    """

    causal = True

    def __init__(
        self,
        heads: int,
        grid: tuple[int, int] | None = None,
        ratio: Ratio = "paper",
        variant: Variant = "two-slope",
    ) -> None:
        super().__init__()
        # Raises for impossible options.
        bias(*(grid or (1, 1)), heads, ratio, variant)
        self.grid, self.heads, self.ratio, self.variant = grid, heads, ratio, variant

    def bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor:
        """Return the bias of every pair, (1, heads, T, T); a cached tensor, read only."""
        queries, keys = query.shape[-2], key.shape[-2]
        grid = require_grid_tokens("alibi-2d", context, self.grid, queries, keys)
        options = context.prefix_tokens, self.heads, self.ratio, self.variant
        return _cached_bias(grid, *options, query.dtype, query.device)


# The cache is small, as the bias of a large grid takes hundreds of megabytes.
@cached_constant(maxsize=8)
def _cached_bias(
    grid: tuple[int, int],
    prefix: int,
    heads: int,
    ratio: Ratio,
    variant: Variant,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    patches = bias(*grid, heads, ratio, variant).to(device=device, dtype=dtype)
    return functional.pad(patches, (prefix, 0, prefix, 0))[None]
