"""Rotary positions (RoPE): pairs of channels of queries and keys, turned by angles of their place.

Turning the query at i and the key at j leaves their product a function of the contents and of the
offset between both places alone (Su et al. 2021). Images (Heo et al. 2024, "Rotary Position
Embedding for Vision Transformer") either split the pairs between columns and rows (axial) or learn
how much each pair heeds either (mixed).
"""

from __future__ import annotations

import functools
import math
from typing import Literal, get_args

import torch
from torch import Tensor

from vlp.positions.options import require_known

Layout = Literal["interleaved", "half"]


def sequence_angles(
    length: int,
    dim: int,
    theta: float = 10000.0,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Tensor:
    """Angles of the places 0, 1, ... of a sequence: place * theta^(-2k/dim) for pair k.

    Args:
        length: tokens.
        dim: channels of one head, even.
        theta: base of the wavelengths.
        dtype: of the result, which is computed in float64.
        device: of the result.

    Returns:
        (length, dim/2), radians.

    Raises:
        ValueError: an odd dim, a negative length, or a theta that is not positive.
    """
    if length < 0:
        raise ValueError(f"a sequence of {length} tokens has no places")
    places = torch.arange(length, dtype=torch.float64, device="cpu")
    return (places[:, None] * pair_frequencies(dim, theta)).to(device=device, dtype=dtype)


def axial_angles(
    height: int,
    width: int,
    dim: int,
    theta: float = 100.0,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Tensor:
    """Angles of a grid's patches in raster order, the "axial frequency" form of RoPE for ViT.

    The first half of the pairs turns with the column, the second with the row, both by
    place * theta^(-4k/dim), k = 0 .. dim/4 - 1.

    Args:
        height: rows of the grid.
        width: columns of the grid.
        dim: channels of one head, a multiple of four.
        theta: base of the wavelengths.
        dtype: of the result, which is computed in float64.
        device: of the result.

    Returns:
        (height * width, dim/2), radians.

    Raises:
        ValueError: a dim that four does not divide, an empty grid, or a theta that is not positive.
    """
    places = grid_places(height, width)
    return split_angles(places, dim, theta).to(device=device, dtype=dtype)


def split_angles(places: Tensor, dim: int, theta: float = 100.0) -> Tensor:
    """Return the axial form at any places: x for the first half of the pairs, y for the second.

    Args:
        places: (..., tokens, 2), x = column and y = row, in patches.
        dim: channels of one head, a multiple of four.
        theta: base of the wavelengths.

    Returns:
        (..., tokens, dim/2), radians.

    Raises:
        ValueError: a dim that four does not divide, or a theta that is not positive.
    """
    frequencies = pair_frequencies(dim, theta, axes=2).to(places)
    return (places[..., None] * frequencies).flatten(-2)


def mixed_angles(places: Tensor, frequencies: Tensor) -> Tensor:
    """Return the "mixed learnable frequency" form of RoPE for ViT: x f_x + y f_y.

    Args:
        places: (..., tokens, 2), x = column and y = row, in patches.
        frequencies: (2, heads, dim/2), those of x, then those of y, radians per patch.

    Returns:
        (..., heads, tokens, dim/2), radians; half precision becomes float32.
    """
    kinds = (places.dtype, frequencies.dtype)
    kind = functools.reduce(torch.promote_types, kinds, torch.float32)
    x, y = places.to(kind)[..., None, :, :].split(1, -1)
    along_x, along_y = frequencies.to(kind)[:, :, None].unbind()
    # products that broadcast: autocast would round a matrix product to bfloat16
    return x * along_x + y * along_y


def grid_places(height: int, width: int, spread: tuple[int, int] | None = None) -> Tensor:
    """Column and row of every patch in raster order.

    Args:
        height: rows of the grid.
        width: columns of the grid.
        spread: (rows, columns) of another grid over the same image, in whose patches the places
            are given: the middle of a patch keeps its share of the image.

    Returns:
        (height * width, 2), float64; 0, 1, ... along each axis where `spread` is None.

    Raises:
        ValueError: an empty grid.
    """
    if height < 1 or width < 1:
        raise ValueError(f"a grid of {height} x {width} has no patches")
    axes = [torch.arange(size, dtype=torch.float64, device="cpu") for size in (height, width)]
    if spread is not None:
        axes = [(axis + 0.5) * (size / len(axis)) - 0.5 for axis, size in zip(axes, spread)]
    row, column = torch.meshgrid(*axes, indexing="ij")
    return torch.stack([column, row], -1).flatten(0, 1)


def pair_frequencies(dim: int, theta: float, axes: int = 1) -> Tensor:
    """Radians per place, theta^(-2 axes k / dim), for the dim / (2 axes) pairs of one axis.

    Args:
        dim: channels of one head.
        theta: base of the wavelengths.
        axes: how many axes share the channels.

    Returns:
        (dim / (2 axes),), float64, falling from 1.

    Raises:
        ValueError: a dim that 2 axes does not divide, or a theta that is not positive.
    """
    if dim < 1 or dim % (2 * axes):
        raise ValueError(f"rotation needs a head width that {2 * axes} divides, not {dim}")
    if not 0 < theta < math.inf:
        raise ValueError(f"theta must be positive, not {theta}")
    exponents = torch.arange(0, dim, 2 * axes, dtype=torch.float64, device="cpu") / dim
    return theta**-exponents


def rotate(x: Tensor, angles: Tensor, layout: Layout = "interleaved") -> Tensor:
    """Turn each pair of channels by its angle: (a, b) to (a cos - b sin, a sin + b cos).

    Pair k is the channels (2k, 2k + 1), in layout `half` (k, k + dim/2). Half precision is computed
    in float32.

    Args:
        x: (..., tokens, dim), queries or keys.
        angles: (tokens, dim/2), radians, or with leading axes that broadcast with those of x.
        layout: "interleaved" or "half".

    Returns:
        x's shape and type.

    Raises:
        ValueError: an unknown layout, or angles that do not fit x.
    """
    if x.shape[-1] != 2 * angles.shape[-1] or x.shape[-2] != angles.shape[-2]:
        raise ValueError(
            f"rotation needs an angle for each token and pair of channels: {tuple(angles.shape)} "
            f"does not fit {tuple(x.shape)}"
        )
    return turn(x, *cosine_and_sine(angles, x.dtype), layout)


def cosine_and_sine(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what `turn` needs for states of `dtype`, in float32 at least; the shape of the angles.

    A float32 angle of 500 is off by 3e-5, so better angles are used to the full before rounding.
    """
    kind = torch.promote_types(dtype, torch.float32)
    angles = angles.to(torch.promote_types(angles.dtype, kind))
    return angles.cos().to(kind), angles.sin().to(kind)


def turn(x: Tensor, cosine: Tensor, sine: Tensor, layout: Layout = "interleaved") -> Tensor:
    """Rotate x (..., T, channels) as `rotate` does, by given cosines and sines."""
    require_layout(layout)
    if layout == "half":
        first, second = x.chunk(2, -1)
    else:
        first, second = x[..., 0::2], x[..., 1::2]
    # cosine and sine are float32 at least, and so are the products
    pair = [first * cosine - second * sine, first * sine + second * cosine]
    out = torch.cat(pair, -1) if layout == "half" else torch.stack(pair, -1).flatten(-2)
    return out.to(x.dtype)


def require_layout(layout: str) -> None:
    """Raise ValueError for a layout of pairs that `turn` does not know."""
    require_known("rotary layout", layout, get_args(Layout))
