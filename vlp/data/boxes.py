"""Boxes [x, y, width, height]: clipped to their image, turned by its EXIF orientation."""

from __future__ import annotations

from collections.abc import Sequence

OUTSIDE, CUT = "box outside its image", "box cut at the edge of its image (kept)"
OTHER_SHAPE = "box of an image of another shape"
SHARES = "box in shares of the image, not in pixels"

Corners = tuple[float, float, float, float]  # left, top, right, bottom in pixels

Size = tuple[int, int]  # width, height in pixels

_MAX_OVERHANG, _MAX_SIDE_ERROR = 1.0, 2.0  # pixels, from rounding of boxes and of resized sides
_MIN_SIDE = 16  # pixels of an image whose boxes are larger than the first pixel

# Upright position of a point by EXIF orientation, relative to width and height.
_UPRIGHT = {
    2: lambda x, y: (1 - x, y),
    3: lambda x, y: (1 - x, 1 - y),
    4: lambda x, y: (x, 1 - y),
    5: lambda x, y: (y, x),
    6: lambda x, y: (1 - y, x),
    7: lambda x, y: (1 - y, 1 - x),
    8: lambda x, y: (y, 1 - x),
}


def overlaps(box: Sequence[float], size: Size) -> bool:
    """Return whether some area of a box lies in its image."""
    x, y, width, height = box
    return min(x + width, size[0]) > max(x, 0.0) and min(y + height, size[1]) > max(y, 0.0)


def clip_box(box: Sequence[float], size: Size) -> tuple[str | None, Corners | None]:
    """Clip a box to an image; return the kind of fault or None, and the clipped box.

    The box is None if it lies outside of the image, or if it seems relative to the image's sides.
    """
    if not overlaps(box, size):
        return OUTSIDE, None
    x, y, width, height = box
    left, top = max(x, 0.0), max(y, 0.0)
    right, bottom = min(x + width, size[0]), min(y + height, size[1])
    # A corner or centre in shares of the sides lies inside of the image: x and y below 1.
    if max(map(abs, box)) <= 1 and max(x, y) < 1 and min(size) >= _MIN_SIDE:
        return SHARES, None
    overhang = max(left - x, top - y, x + width - right, y + height - bottom)
    return CUT if overhang > _MAX_OVERHANG else None, (left, top, right, bottom)


def turn_of(annotated_size: Size, upright_size: Size, orientation: int) -> int | None:
    """Return the EXIF orientation in which boxes were annotated; None if aspect ratios differ.

    Boxes of the upright image's aspect ratio count as upright (1): orientations 2 to 4 keep it.
    """
    if _same_aspect(upright_size, annotated_size):
        return 1
    is_sideways = orientation > 4 and _same_aspect(upright_size[::-1], annotated_size)
    return orientation if is_sideways else None


def relative_corners(corners: Corners, annotated_size: Size, orientation: int) -> Corners:
    """Return the corners in the upright image, relative to its sides; `orientation`: `turn_of`."""
    turn = _UPRIGHT.get(orientation, lambda x, y: (x, y))
    width, height = annotated_size
    points = [turn(x / width, y / height) for x, y in (corners[:2], corners[2:])]
    (left, right), (top, bottom) = (sorted(values) for values in zip(*points))
    return left, top, right, bottom


def _same_aspect(size: Size, other: Size) -> bool:
    scale = max(size[0] / other[0], size[1] / other[1])
    error = max(abs(side - scale * other_side) for side, other_side in zip(size, other))
    return error <= _MAX_SIDE_ERROR * max(1.0, scale)  # sides of both are rounded to pixels
