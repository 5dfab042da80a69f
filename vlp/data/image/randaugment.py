"""RandAugment without operations that change hue, because captions name colours.

Those of torchvision and timm stretch channels one by one and clip them, which changes hue.

Images are float32 levels, (3, height, width) in 0..255: what is added up or turned is rounded
nowhere, and no operation needs another copy in Pillow's layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

# ALBEF shifts by at most 10 px of 256.
_SHIFT = 10 / 256

# Uncovered corners of shifted and turned images: mid grey, which normalises to about zero.
_FILL = 128.0


# ALBEF's RandAugment(2, 7): operations for each image, and their magnitude of 10.
_COUNT, _MAGNITUDE = 2, 7


def randaugment(levels: Tensor, rng: np.random.Generator) -> Tensor:
    """Apply operations picked with replacement, of random signs, to (3, height, width) float32."""
    for _ in range(_COUNT):
        operation = OPERATIONS[int(rng.integers(len(OPERATIONS)))]
        sign = 1 if rng.random() < 0.5 else -1
        levels = operation(levels, _MAGNITUDE / 10, sign)
    return levels


def _identity(levels: Tensor, strength: float, sign: int) -> Tensor:
    return levels


def _autocontrast(levels: Tensor, strength: float, sign: int) -> Tensor:
    # One stretch for all channels, from the darkest to the brightest value of any: stretched one by
    # one, or past 255, they would change hue.
    low, high = map(float, levels.aminmax())
    return levels if low == high else (levels - low).mul_(255 / (high - low))


def _equalize(levels: Tensor, strength: float, sign: int) -> Tensor:
    # On the value of HSV alone. All channels times one factor keep hue and saturation.
    value = levels.amax(0)
    numbers = value.round().int().view(-1)
    counts = torch.bincount(numbers, minlength=256)
    step = (len(numbers) - int(counts[counts.nonzero()[-1]])) // 255
    if step == 0:
        return levels
    below = counts.cumsum(0) - counts
    table = ((below + step // 2) // step).clamp(max=255).float()
    return levels * (table.index_select(0, numbers).view_as(value) / value.clamp(min=1))


def _brightness(levels: Tensor, strength: float, sign: int) -> Tensor:
    # On the value alone, up to 255: RGB scaled past 255 turns orange into yellow.
    return levels * (255 / levels.amax(0)).clamp(max=1 + sign * 0.9 * strength)


def _sharpness(levels: Tensor, strength: float, sign: int) -> Tensor:
    # Away from, or towards, a smoothed image: 3 x 3 neighbours, the middle five times (Pillow's
    # filter). The sum over the nine holds the middle once.
    share = sign * 0.9 * strength / 13
    middle = levels[:, 1:-1, 1:-1]
    rows = levels[:, :-2] + levels[:, 1:-1] + levels[:, 2:]
    nine = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    sharpened = levels.clone()
    sharpened[:, 1:-1, 1:-1] = nine.mul_(-share).add_(middle, alpha=1 + 9 * share).clamp_(0, 255)
    return sharpened


def _shear_x(levels: Tensor, strength: float, sign: int) -> Tensor:
    return _affine(levels, (1, sign * 0.3 * strength, 0), (0, 1, 0))


def _shear_y(levels: Tensor, strength: float, sign: int) -> Tensor:
    return _affine(levels, (1, 0, 0), (sign * 0.3 * strength, 1, 0))


def _translate_x(levels: Tensor, strength: float, sign: int) -> Tensor:
    return _shifted(levels, sign * _SHIFT * strength * levels.shape[2], 2)


def _translate_y(levels: Tensor, strength: float, sign: int) -> Tensor:
    return _shifted(levels, sign * _SHIFT * strength * levels.shape[1], 1)


def _rotate(levels: Tensor, strength: float, sign: int) -> Tensor:
    angle = math.radians(sign * 30 * strength)
    cosine, sine = math.cos(angle), math.sin(angle)
    x, y = levels.shape[2] / 2, levels.shape[1] / 2
    across = (cosine, -sine, x - cosine * x + sine * y)
    down = (sine, cosine, y - sine * x - cosine * y)
    return _affine(levels, across, down)


def _shifted(levels: Tensor, by: float, dim: int) -> Tensor:
    """Shift so that each place takes the value from `by` pixels further on, interpolated."""
    length = levels.shape[dim]
    whole = math.floor(by)
    part = by - whole
    out = torch.full_like(levels, _FILL)
    for step, weight in ((whole, 1 - part), (whole + 1, part)):
        kept = length - abs(step)
        if weight and kept > 0:
            source = levels.narrow(dim, max(step, 0), kept)
            out.narrow(dim, max(-step, 0), kept).add_(source - _FILL, alpha=weight)
    return out


def _affine(
    levels: Tensor, across: tuple[float, float, float], down: tuple[float, float, float]
) -> Tensor:
    """Take (x, y) from (a x + b y + c, d x + e y + f), bilinear; in pixels."""
    height, width = levels.shape[1:]
    x, y = torch.arange(width) + 0.5, (torch.arange(height) + 0.5)[:, None]
    places = torch.empty(1, height, width, 2)
    for axis, (by_x, by_y, fixed), size in ((0, across, width), (1, down, height)):
        # grid_sample counts from -1 to 1 over the image.
        torch.add(
            x * (2 * by_x / size),
            y * (2 * by_y / size) + (2 * fixed / size - 1),
            out=places[0, ..., axis],
        )
    centred = (levels - _FILL)[None]  # what lies outside counts as zero
    return grid_sample(centred, places, align_corners=False)[0].add_(_FILL)


OPERATIONS: tuple[Callable[[Tensor, float, int], Tensor], ...] = (
    _identity,
    _autocontrast,
    _equalize,
    _brightness,
    _sharpness,
    _shear_x,
    _shear_y,
    _translate_x,
    _translate_y,
    _rotate,
)
