"""Boxes [x, y, width, height] cut to the upright image and turned by its EXIF orientation."""

from __future__ import annotations

from collections.abc import Sequence

OUTSIDE, CUT = "box outside its image", "box cut at the edge of its image (kept)"
OTHER_SHAPE = "box of an image of another shape"
SHARES = "box in shares of the image, not in pixels"

Corners = tuple[float, float, float, float]  # left, top, right, bottom in pixels

Size = tuple[int, int]  # width, height in pixels

_ROUNDING, _SHAPE_ROUNDING = 1.0, 2.0  # pixels: overhang of a box, error of a resized side
_SMALLEST = 16  # pixels of a side from which on nobody draws a box in the first pixel

# What each EXIF orientation does to a point, in shares of width and height.
_TURNED = {
    2: lambda x, y: (1 - x, y),
    3: lambda x, y: (1 - x, 1 - y),
    4: lambda x, y: (x, 1 - y),
    5: lambda x, y: (y, x),
    6: lambda x, y: (1 - y, x),
    7: lambda x, y: (1 - y, 1 - x),
    8: lambda x, y: (y, 1 - x),
}


def clip_box(box: Sequence[float], size: Size) -> tuple[str | None, Corners | None]:
    """Cut a box to an image; return the kind of fault, if any, and the box.

    The box is None if it is empty or in shares of the image.
    """
    x, y, width, height = box
    left, top = max(x, 0.0), max(y, 0.0)
    right, bottom = min(x + width, size[0]), min(y + height, size[1])
    if right <= left or bottom <= top:
        return OUTSIDE, None
    if max(map(abs, box)) <= 1 and min(size) >= _SMALLEST:
        return SHARES, None
    overhang = max(left - x, top - y, x + width - right, y + height - bottom)
    return CUT if overhang > _ROUNDING else None, (left, top, right, bottom)


def turn_of(drawn_on: Size, upright: Size, orientation: int) -> int | None:
    """Return the EXIF orientation to turn boxes by (1: upright); None if the shapes differ."""
    if _has_shape(upright, drawn_on):
        return 1
    return orientation if orientation > 4 and _has_shape(upright[::-1], drawn_on) else None


def shares(corners: Corners, drawn_on: Size, orientation: int) -> Corners:
    """Return corners as shares of the sides of the upright image; `orientation` as of `turn_of`."""
    turn = _TURNED.get(orientation, lambda x, y: (x, y))
    points = [turn(x / drawn_on[0], y / drawn_on[1]) for x, y in (corners[:2], corners[2:])]
    (left, right), (top, bottom) = (sorted(values) for values in zip(*points))
    return left, top, right, bottom


def _has_shape(size: Size, shape: Size) -> bool:
    scale = max(size[0] / shape[0], size[1] / shape[1])
    deviation = max(abs(side - scale * other) for side, other in zip(size, shape))
    return deviation <= _SHAPE_ROUNDING * max(1.0, scale)  # either may be rounded to whole pixels
