"""Fixed sinusoids of positions: raster order, single coordinates, or coordinate vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlp.positions.base import PositionContext, TokenEncoding
from vlp.positions.coordinates import (
    require_extent,
    sequence_length,
    token_coordinates,
    vertical_first,
)
from vlp.positions.modulator import Modulator
from vlp.positions.options import require_choice, require_defaults

LAYOUTS = ("halves", "interleaved")


def frequencies(
    channels: int, temperature: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return temperature ^ (-2k / channels), k = 0, 1, ...: (channels / 2,), radians per unit."""
    if channels < 2 or channels % 2:
        raise ValueError(f"{channels} channels are no pairs of sine and cosine")
    if not temperature > 0:
        raise ValueError(f"the temperature must be positive, not {temperature}")
    steps = torch.arange(0, channels, 2, dtype=dtype, device=device)
    return torch.pow(temperature, steps / -channels)


def sinusoid(
    positions: Tensor, channels: int, temperature: float = 10_000.0, layout: str = "halves"
) -> Tensor:
    """Return sinusoids of positions (Vaswani et al.; Li et al., Eq. 1; ViTARC, Eq. 13).

    Args:
        positions: (...), any dtype.
        channels: of the encoding; even.
        temperature: frequencies fall from 1 to nearly 1 / temperature.
        layout: "halves", all sines, then all cosines (papers.md#vitarc-v10), or "interleaved",
            sine and cosine of each frequency in turn, as Vaswani et al. print it.

    Returns:
        (..., channels) in the dtype of `positions`, float32 for integers; half precision is
        computed in float32.
    """
    dtype = torch.promote_types(positions.dtype, torch.float32)
    freqs = frequencies(channels, temperature, dtype, positions.device)
    out = _waves(positions.to(dtype).unsqueeze(-1) * freqs, layout)
    return out.to(positions.dtype) if positions.is_floating_point() else out


def md_sinusoid(coords: Tensor, freqs: Tensor, layout: str = "halves") -> Tensor:
    """Return MD-Sine, sin(w . x) and cos(w . x) of coordinate vectors x: (..., channels).

    **Reconstruction (papers.md#fourier-f11).** The available text of Appendix C of Li et al. lost
    the formula; its prose 'adapts the original frequencies for each dimension' of a linear
    combination. Frequencies (channels / 2, M) allow every linear combination.

    Args:
        coords: (..., M).
        freqs: w, (channels / 2,) for all coordinates, or (channels / 2, M).
        layout: see `sinusoid`, also for the dtype.
    """
    if freqs.ndim not in (1, 2) or (freqs.ndim == 2 and freqs.shape[1] != coords.shape[-1]):
        raise ValueError(
            f"frequencies {tuple(freqs.shape)} are neither (pairs,) nor "
            f"(pairs, {coords.shape[-1]} coordinates)"
        )
    dtype = torch.promote_types(coords.dtype, torch.float32)
    x, freqs = coords.to(dtype), freqs.to(coords.device, dtype)
    if freqs.ndim == 1:
        # Positions of equal coordinate sums are then equal, which fits the paper's poor result.
        angles = x.sum(-1, keepdim=True) * freqs
    else:
        # Not a matrix product, in which autocast and TF32 would round the angles.
        angles = (x.unsqueeze(-2) * freqs).sum(-1)
    out = _waves(angles, layout)
    return out.to(coords.dtype) if coords.is_floating_point() else out


class SinePosition(TokenEncoding):
    """`sine-1d`, `sine-2d`, `sine-4d`: sinusoids of coordinates (papers.md#fourier-f12).

    `sine-1d` numbers the tokens after the prefix. `sine-2d` concatenates sinusoids of row and
    column; `sine-4d` of top, left, bottom and right of a box, in Li et al.'s order, where each
    patch of a grid is a box. With `mlp` the sinusoids pass the MLP of the Fourier encoder, all
    together ('Sine + MLP') or in groups of coordinates ('Sine-4D+MLP-2/2').

    Coordinates count patches by default, as Eq. 1 counts tokens. `extent` normalises them: 2 pi is
    DETR's range, 100 that of the paper's widget captioning. The context's coordinates are shares of
    the image and need `extent` or a grid. Any grid works. Prefix tokens get no position.

    Args:
        dimensions: 1, 2 or 4.
        width: channels of the tokens; a multiple of twice the dimensions.
        grid: (rows, columns) where the context has no grid; sine-1d needs no grid.
        temperature, layout: see `sinusoid`; the layout is of each coordinate.
        extent: the image's width and height (sine-1d: the sequence's length) in the unit of the
            sinusoids; None counts patches.
        mlp: hidden channels of an MLP after the sinusoids; None: no MLP.
        groups: number of groups of coordinates that share the MLP.
        approximate: see `Modulator`.
    """

    def __init__(
        self,
        dimensions: int,
        width: int,
        grid: tuple[int, int] | None = None,
        temperature: float = 10_000.0,
        layout: str = "halves",
        extent: float | None = None,
        mlp: int | None = None,
        groups: int = 1,
        approximate: str = "none",
        mixer: bool = False,
    ) -> None:
        super().__init__(f"sine-{dimensions}d", width, mixer)
        if dimensions not in (1, 2, 4):
            raise ValueError(f"sine encodings have 1, 2 or 4 dimensions, not {dimensions}")
        if width % (2 * dimensions):
            raise ValueError(
                f"{self.name}: width {width} is not a multiple of {2 * dimensions}, pairs of "
                f"channels for {dimensions} coordinates"
            )
        if groups < 1 or dimensions % groups or (groups > 1 and mlp is None):
            raise ValueError(
                f"{self.name}: {groups} groups must divide the {dimensions} coordinates and need "
                "the option mlp"
            )
        if mlp is None:
            require_defaults(self.name, SinePosition, "without mlp", approximate=approximate)
        require_extent(self.name, extent)
        # Raises for impossible options.
        sinusoid(torch.zeros(1), width // dimensions, temperature, layout)
        self.grid, self.dimensions, self.groups = grid, dimensions, groups
        self.temperature, self.layout, self.extent = temperature, layout, extent
        group_width = width // groups
        self.mlp = None if mlp is None else Modulator(group_width, mlp, group_width, approximate)

    def embeddings(self, x: Tensor, context: PositionContext) -> Tensor:
        """Return sinusoids of the tokens' positions: (B or 1, T - prefix, width)."""
        if self.dimensions == 1:
            coords = self._raster_order(x, context)
        else:
            coords = vertical_first(
                token_coordinates(self.name, self.dimensions, x, context, self.grid, self.extent)
            )
        channels = self.width // self.dimensions
        # (B or 1, T - prefix, dimensions, channels)
        waves = sinusoid(coords, channels, self.temperature, self.layout)
        if self.mlp is None:
            return waves.flatten(-2)
        # (B or 1, T - prefix, groups, width / groups): the MLP gets a group's coordinates together.
        grouped = waves.unflatten(-2, (self.groups, -1)).flatten(-2)
        return self.mlp(grouped).flatten(-2)

    def _raster_order(self, x: Tensor, context: PositionContext) -> Tensor:
        """Return the positions of the tokens after the prefix: (B or 1, T - prefix, 1)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        length = sequence_length(self.name, x, context)
        index = torch.arange(length, dtype=dtype, device=x.device)[None, :, None]
        if self.extent is None:
            return index
        if context.grids is None:
            return (index + 0.5) * (self.extent / max(length, 1))
        # Padded images: each has a length of its own.
        return (index + 0.5) * (self.extent / context.grids.to(index).prod(-1)[:, None, None])


class MDSinePosition(TokenEncoding):
    """`md-sine`: fixed sinusoids of coordinate vectors, one linear combination per frequency.

    The baseline MD-Sine of Li et al. 2021. **Reconstruction (papers.md#fourier-f11)**: see
    `md_sinusoid`. Units, grids, prefix tokens and the MLP are as in `SinePosition`, without groups.

    Args:
        width: channels of the tokens; even.
        grid: (rows, columns) where the context has no grid.
        dimensions: 2 for points x, y, 4 for boxes x0, y0, x1, y1.
        freqs: width / 2 numbers, or width / 2 rows of a number per coordinate (x first), in radians
            per unit; None: `frequencies` of the temperature.
        temperature, layout, approximate: see `SinePosition`.
        extent: the image's width and height in the unit of the sinusoids; None counts patches.
        mlp: hidden channels of an MLP after the sinusoids; None: no MLP.
    """

    def __init__(
        self,
        width: int,
        grid: tuple[int, int] | None = None,
        dimensions: int = 2,
        freqs: Sequence[float] | Sequence[Sequence[float]] | None = None,
        temperature: float = 10_000.0,
        layout: str = "halves",
        extent: float | None = None,
        mlp: int | None = None,
        approximate: str = "none",
        mixer: bool = False,
    ) -> None:
        super().__init__("md-sine", width, mixer)
        if dimensions not in (2, 4):
            raise ValueError(f"md-sine positions have 2 or 4 dimensions, not {dimensions}")
        if mlp is None:
            require_defaults(self.name, MDSinePosition, "without mlp", approximate=approximate)
        if freqs is not None:
            require_defaults(self.name, MDSinePosition, "beside freqs", temperature=temperature)
        require_extent(self.name, extent)
        # On the CPU, as `meta` has no numbers.
        cpu = torch.device("cpu")
        table = frequencies(width, temperature, torch.float64, cpu)
        if freqs is not None:
            table = torch.as_tensor(freqs, dtype=table.dtype, device=cpu)
        # Raises for other shapes and layouts.
        md_sinusoid(torch.zeros(1, dimensions, device=cpu), table, layout)
        if len(table) != width // 2:
            raise ValueError(f"md-sine: width {width} takes {width // 2} freqs, not {len(table)}")
        # Not a buffer, which `module.to(bfloat16)` would round.
        self.freqs = table.tolist()
        self.grid, self.dimensions, self.layout, self.extent = grid, dimensions, layout, extent
        self.mlp = None if mlp is None else Modulator(width, mlp, width, approximate)

    def embeddings(self, x: Tensor, context: PositionContext) -> Tensor:
        """Return sinusoids of the tokens' positions: (B or 1, T - prefix, width)."""
        coords = token_coordinates(self.name, self.dimensions, x, context, self.grid, self.extent)
        freqs = torch.tensor(self.freqs, dtype=coords.dtype, device=coords.device)
        waves = md_sinusoid(coords, freqs, self.layout)
        return waves if self.mlp is None else self.mlp(waves)


def _waves(angles: Tensor, layout: str) -> Tensor:
    """Return sines and cosines of angles (..., pairs): (..., 2 pairs)."""
    require_choice("layout", layout, LAYOUTS)
    if layout == "halves":
        return torch.cat([angles.sin(), angles.cos()], -1)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)
