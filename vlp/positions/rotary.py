"""Rotary position encodings (RoPE), which rotate pairs of channels of queries and keys.

The product of a rotated query and key depends on contents and offset alone (Su et al. 2021). On
images (Heo et al. 2024, "Rotary Position Embedding for Vision Transformer") half of the pairs turn
with the column and half with the row (axial), or each pair learns a frequency of either (mixed).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from vlp.positions.base import PositionContext, PositionEncoding, cached_constant
from vlp.positions.coordinates import patches_per_side, require_grid_tokens, require_patches
from vlp.positions.options import head_width, require_choice

Layout = Literal["interleaved", "half"]


def sequence_angles(length: int, dim: int, theta: float = 10000.0) -> Tensor:
    """Return angles position * theta^(-2k/dim), radians, of positions 0, 1, ... and pairs k.

    They are (length, dim/2) float64.
    """
    if length < 0:
        raise ValueError(f"a sequence of {length} tokens has no positions")
    positions = torch.arange(length, dtype=torch.float64, device="cpu")
    return positions[:, None] * pair_frequencies(dim, theta)


def axial_angles(height: int, width: int, dim: int, theta: float = 100.0) -> Tensor:
    """Return `split_angles` of patches in raster order: (height * width, dim/2) float64."""
    return split_angles(grid_positions(height, width), dim, theta)


def split_angles(positions: Tensor, dim: int, theta: float) -> Tensor:
    """Return the angles of RoPE for ViT's "axial frequency" form: (..., tokens, dim/2), radians.

    The first half of the pairs turns with x, the second with y, both by position *
    theta^(-4k/dim), k = 0 .. dim/4 - 1.

    Args:
        positions: (..., tokens, 2), x = column and y = row, in patches.
        dim: channels of a head, a multiple of four.
        theta: base of the wavelengths.
    """
    frequencies = pair_frequencies(dim, theta, axes=2).to(positions)
    return (positions[..., None] * frequencies).flatten(-2)


def mixed_angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Return the angles x f_x + y f_y of RoPE for ViT's "mixed learnable frequency" form.

    They are (..., heads, tokens, dim/2), radians, in float32 or better.

    Args:
        positions: (..., tokens, 2), x = column and y = row, in patches.
        frequencies: (2, heads, dim/2), f_x, then f_y, radians per patch.
    """
    dtypes = (positions.dtype, frequencies.dtype)
    dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
    x, y = positions.to(dtype)[..., None, :, :].split(1, -1)
    frequency_x, frequency_y = frequencies.to(dtype)[:, :, None].unbind()
    # Not a matrix product, which autocast would round to bfloat16.
    return x * frequency_x + y * frequency_y


def grid_positions(height: int, width: int, ref_grid: tuple[int, int] | None = None) -> Tensor:
    """Return column and row of every patch in raster order: (height * width, 2), float64.

    ref_grid: (rows, columns) of another grid over the same image, whose patches are the unit of the
    result; None counts patches of this grid.
    """
    require_patches("rope", (height, width))
    axes = [torch.arange(size, dtype=torch.float64, device="cpu") for size in (height, width)]
    if ref_grid is not None:
        axes = [(axis + 0.5) * (size / len(axis)) - 0.5 for axis, size in zip(axes, ref_grid)]
    row, column = torch.meshgrid(*axes, indexing="ij")
    return torch.stack([column, row], -1).flatten(0, 1)


def pair_frequencies(dim: int, theta: float, axes: int = 1) -> Tensor:
    """Return theta^(-2 axes k / dim), radians per step of one axis: (dim / (2 axes),) float64."""
    if dim < 1 or dim % (2 * axes):
        raise ValueError(f"rotation needs a head width that {2 * axes} divides, not {dim}")
    if not 0 < theta < math.inf:
        raise ValueError(f"theta must be positive, not {theta}")
    # On the CPU, as a default device `meta` has no numbers.
    exponents = torch.arange(0, dim, 2 * axes, dtype=torch.float64, device="cpu") / dim
    return theta**-exponents


def rotate(x: Tensor, angles: Tensor, layout: Layout = "interleaved") -> Tensor:
    """Rotate each pair of channels by its angle: (a, b) to (a cos - b sin, a sin + b cos).

    Half precision is computed in float32; the result has the shape and dtype of x.

    Args:
        x: (..., tokens, dim), queries or keys.
        angles: (tokens, dim/2), radians, or with leading axes that broadcast with x.
        layout: pair k is the channels (2k, 2k + 1) ("interleaved") or (k, k + dim/2) ("half").
    """
    if x.shape[-1] != 2 * angles.shape[-1] or x.shape[-2] != angles.shape[-2]:
        raise ValueError(
            f"rotation needs an angle for each token and pair of channels: {tuple(angles.shape)} "
            f"does not fit {tuple(x.shape)}"
        )
    return apply_rotation(x, *cosine_and_sine(angles, x.dtype), layout)


def cosine_and_sine(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for `apply_rotation`, in `dtype`, or float32 for half precision."""
    # Rounded last: an angle of 500 in float32 is off by 3e-5.
    out_dtype = torch.promote_types(dtype, torch.float32)
    angles = angles.to(torch.promote_types(angles.dtype, out_dtype))
    return angles.cos().to(out_dtype), angles.sin().to(out_dtype)


def apply_rotation(
    x: Tensor, cosine: Tensor, sine: Tensor, layout: Layout = "interleaved"
) -> Tensor:
    """Rotate x (..., T, channels) as `rotate` does, by the angles' cosines and sines."""
    require_choice("rotary layout", layout, get_args(Layout))
    if layout == "half":
        first, second = x.chunk(2, -1)
    else:
        first, second = x[..., 0::2], x[..., 1::2]
    # Products are in the dtype of cosine and sine, at least float32.
    pair = [first * cosine - second * sine, first * sine + second * cosine]
    out = torch.cat(pair, -1) if layout == "half" else torch.stack(pair, -1).flatten(-2)
    return out.to(x.dtype)


class _Rotary(PositionEncoding):
    """Base of all forms of RoPE; a subclass computes `_cosine_and_sine`.

    Args:
        width: channels of the layer.
        heads: attention heads; their width must be even, on grids a multiple of four.
        theta: base of the wavelengths.
        layout: see `rotate`.
    """

    causal = True

    def __init__(
        self, name: str, width: int, heads: int, theta: float, layout: Layout, axes: int
    ) -> None:
        super().__init__()
        self.head_width = head_width(name, width, heads)
        if self.head_width % (2 * axes):
            raise ValueError(
                f"{name} needs a head width that {2 * axes} divides, not {self.head_width} "
                f"(width {width}, {heads} heads)"
            )
        # Raises unless theta is positive.
        pair_frequencies(self.head_width, theta, axes)
        require_choice("rotary layout", layout, get_args(Layout))
        self.name, self.theta, self.layout = name, theta, layout

    def rotate(self, query: Tensor, key: Tensor, context: PositionContext) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys (B, heads, T, head width); prefix tokens stay unchanged."""
        query_shape, key_shape = tuple(query.shape[-2:]), tuple(key.shape[-2:])
        if query_shape != key_shape or query_shape[1] != self.head_width:
            raise ValueError(
                f"{self.name} rotates queries and keys of the same tokens with head width "
                f"{self.head_width}, not {query_shape} and {key_shape}"
            )
        # The angle of prefix tokens is 0, which is exact.
        cosine, sine = self._cosine_and_sine(query, context)
        query, key = (apply_rotation(x, cosine, sine, self.layout) for x in (query, key))
        return query, key

    def _cosine_and_sine(self, query: Tensor, context: PositionContext) -> Sequence[Tensor]:
        """Return cosines and sines (..., T, head width / 2) for queries (B, heads, T, ...)."""
        raise NotImplementedError


class RotarySequence(_Rotary):
    """`rope-1d`: RoPE over the order of the tokens (Su et al. 2021), text or a grid's raster order.

    Positions count from 0 after the prefix, which is not rotated; without a prefix [CLS] has a
    position, too. Any length and grid works, but in raster order the patch above is a whole row
    away. Attached to a trained model it changes the model's function.
    """

    def __init__(
        self, width: int, heads: int, theta: float = 10000.0, layout: Layout = "interleaved"
    ) -> None:
        super().__init__("rope-1d", width, heads, theta, layout, axes=1)

    def _cosine_and_sine(self, query: Tensor, context: PositionContext) -> Sequence[Tensor]:
        tokens, prefix = query.shape[-2], context.prefix_tokens
        if tokens < prefix:
            raise ValueError(
                f"{self.name}: {prefix} prefix tokens are more than the {tokens} tokens"
            )
        options = prefix, self.head_width, self.theta, query.dtype, query.device
        return _cached_sequence(tokens - prefix, *options).unbind()


class _GridRotary(_Rotary):
    """Base of RoPE on patches of a grid, or on tokens with coordinates.

    Args:
        grid: (rows, columns) of the trained grid, for contexts without a grid, for coordinates
            and for `rescale`.
        rescale: on another grid, count in patches of the trained grid.
    """

    def __init__(
        self,
        name: str,
        width: int,
        heads: int,
        grid: tuple[int, int] | None,
        theta: float,
        rescale: bool,
        layout: Layout,
    ) -> None:
        super().__init__(name, width, heads, theta, layout, axes=2)
        if grid is not None:
            require_patches(name, grid)
        elif rescale:
            raise ValueError(f"{name}: rescale needs the trained grid, but grid is None")
        self.grid, self.ref_grid = grid, grid if rescale else None

    def _grid(self, query: Tensor, context: PositionContext) -> tuple[int, int]:
        tokens = query.shape[-2]
        return require_grid_tokens(self.name, context, self.grid, tokens, tokens)

    def _coordinates(self, query: Tensor, context: PositionContext) -> Tensor | None:
        """Return the context's coordinates as columns and rows in patches, (B, T, 2), or None."""
        if context.coordinates is None:
            return None
        # bfloat16 is too coarse for the patches of a large grid.
        dtype = torch.promote_types(query.dtype, torch.float32)
        coordinates = context.coordinates.to(query.device, dtype)
        # With `rescale` the unit is a patch of the trained grid.
        unit = patches_per_side(coordinates, None if self.ref_grid else context.grids, self.grid)
        if unit is None:
            raise ValueError(f"{self.name}: coordinates need a grid in the options, as their unit")
        shape = tuple(coordinates.shape)
        prefix, tokens = context.prefix_tokens, query.shape[-2]
        if len(shape) != 3 or shape[-1] not in (2, 4) or prefix + shape[1] != tokens:
            raise ValueError(
                f"{self.name}: {tokens} tokens of which {prefix} are prefix need coordinates "
                f"(batch, {tokens - prefix}, 2 or 4), not {shape}"
            )
        if shape[-1] == 4:
            coordinates = (coordinates[..., :2] + coordinates[..., 2:]) / 2
        # Patch (row, column) is at (column, row): its centre is half a patch further.
        positions = coordinates * unit - 0.5
        return functional.pad(positions, (0, 0, prefix, 0))


class RotaryAxial(_GridRotary):
    """`rope-axial`: half of the pairs turn with the column, half with the row (Heo et al. 2024).

    Any grid works, as only offsets matter. Prefix tokens are not rotated. Coordinates of the
    context are converted to patches; a box has the position of its centre. Attached to a trained
    model it changes the model's function.

    Args:
        theta: base of the wavelengths, lower than for text, as images have fewer positions.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        grid: tuple[int, int] | None = None,
        theta: float = 100.0,
        rescale: bool = False,
        layout: Layout = "interleaved",
    ) -> None:
        super().__init__("rope-axial", width, heads, grid, theta, rescale, layout)

    def _cosine_and_sine(self, query: Tensor, context: PositionContext) -> Sequence[Tensor]:
        positions = self._coordinates(query, context)
        if positions is not None:
            angles = split_angles(positions[:, None], self.head_width, self.theta)
            return cosine_and_sine(angles, query.dtype)
        grid = self._grid(query, context)
        options = self.ref_grid, context.prefix_tokens, self.head_width, self.theta
        return _cached_axial(grid, *options, query.dtype, query.device).unbind()


class RotaryMixed(_GridRotary):
    """`rope-mixed`: pairs turn by x f_x + y f_y, with learned frequencies (Heo et al. 2024).

    Each layer and head has its frequencies. Grids, prefix tokens and coordinates are as in
    `rope-axial`. Attached to a trained model it changes the model's function.

    Args:
        theta: base of the initial wavelengths.
    """

    # Exempt in the authors' code, too.
    NO_WEIGHT_DECAY = ("frequency_table",)

    def __init__(
        self,
        width: int,
        heads: int,
        grid: tuple[int, int] | None = None,
        theta: float = 10.0,
        rescale: bool = False,
        layout: Layout = "interleaved",
    ) -> None:
        super().__init__("rope-mixed", width, heads, grid, theta, rescale, layout)
        # Each head starts with a random direction: half of its pairs turn along it, the others
        # along its perpendicular, by theta^(-4k/dim) radians per patch.
        direction = torch.rand(heads, 1, 1) * (2 * math.pi)
        frequencies = pair_frequencies(self.head_width, theta, axes=2).to(direction)
        directions = torch.cat([direction, direction + math.pi / 2], 1)
        table = torch.stack([directions.cos() * frequencies, directions.sin() * frequencies])
        self.frequency_table = nn.Parameter(table.flatten(-2))  # (2, heads, dim / 2)

    def _cosine_and_sine(self, query: Tensor, context: PositionContext) -> Sequence[Tensor]:
        positions = self._coordinates(query, context)
        if positions is None:
            dtype = torch.promote_types(query.dtype, torch.float32)
            grid = self._grid(query, context)
            positions = _cached_positions(
                grid, self.ref_grid, context.prefix_tokens, dtype, query.device
            )
        return cosine_and_sine(mixed_angles(positions, self.frequency_table), query.dtype)


@cached_constant(maxsize=32)
def _cached_sequence(
    length: int, prefix: int, dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return cosines and sines of a prefix (angle 0) and a sequence, (2, tokens, dim / 2)."""
    angles = functional.pad(sequence_angles(length, dim, theta), (0, 0, prefix, 0))
    return torch.stack(cosine_and_sine(angles, dtype)).to(device)


@cached_constant(maxsize=32)
def _cached_axial(
    grid: tuple[int, int],
    ref_grid: tuple[int, int] | None,
    prefix: int,
    dim: int,
    theta: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return cosines and sines of a prefix (angle 0) and a grid, (2, tokens, dim / 2)."""
    positions = _cached_positions(grid, ref_grid, prefix, torch.float64, torch.device("cpu"))
    return torch.stack(cosine_and_sine(split_angles(positions, dim, theta), dtype)).to(device)


@cached_constant(maxsize=32)
def _cached_positions(
    grid: tuple[int, int],
    ref_grid: tuple[int, int] | None,
    prefix: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return columns and rows of a prefix (0, 0) and of a grid's patches, (tokens, 2)."""
    return functional.pad(grid_positions(*grid, ref_grid), (0, 0, prefix, 0)).to(device, dtype)
