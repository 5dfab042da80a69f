"""Rendering of a scene with Pillow, anti-aliased, at its image size."""

from __future__ import annotations

import io
import math

from PIL import Image, ImageDraw

from vlp.scenes.graph import PLACES, Box, Scene

SUPERSAMPLING = 4
CURTAIN = ((92, 84, 78), (120, 110, 102))  # stripes, in colours that no object has

Point = tuple[float, float]


def render(scene: Scene) -> Image.Image:
    """Return the image of a scene, RGB, `image_size` pixels a side."""
    side = scene.image_size * SUPERSAMPLING
    image = Image.new("RGB", (side, side), scene.background)
    canvas = ImageDraw.Draw(image)
    for obj, colour in zip(scene.objects, scene.tints, strict=True):
        _draw(canvas, obj.shape, obj.box, colour)
    if scene.cover is not None:
        _draw_curtain(canvas, cover_box(scene.cover, scene.image_size))
    # A box filter: exact coverage of pixels, several times as fast as Lanczos.
    return image.reduce(SUPERSAMPLING)


def encode_png(image: Image.Image) -> bytes:
    """Encode an image as PNG, which any decoder reads to the same pixels."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=6)
    return buffer.getvalue()


def cover_box(place: str, image_size: int) -> Box:
    """Return the [x, y, width, height] in pixels that a curtain over `place` hides."""
    row, column = divmod(PLACES.index(place), 3)
    third = image_size / 3
    return column * third, row * third, third, third


def _draw(canvas: ImageDraw.ImageDraw, shape: str, box: Box, colour: tuple[int, int, int]) -> None:
    x, y, width, height = (value * SUPERSAMPLING for value in box)
    if shape == "circle":
        canvas.ellipse((x, y, x + width - 1, y + height - 1), fill=colour)
    else:
        # Pillow draws the last pixel too, so the box is one supersampled pixel narrower.
        width, height = width - 1, height - 1
        corners = [(x + width * u, y + height * v) for u, v in _UNIT_OUTLINES[shape]]
        canvas.polygon(corners, fill=colour)


def _draw_curtain(canvas: ImageDraw.ImageDraw, box: Box) -> None:
    x, y, width, height = (value * SUPERSAMPLING for value in box)
    stripes = 6
    for stripe in range(stripes):
        left = x + width * stripe / stripes
        right = x + width * (stripe + 1) / stripes
        canvas.rectangle((left, y, right - 1, y + height - 1), fill=CURTAIN[stripe % 2])


def _star() -> list[Point]:
    points = []
    for corner in range(10):
        radius = 1.0 if corner % 2 == 0 else 0.45
        angle = math.pi * corner / 5
        points.append((radius * math.sin(angle), -radius * math.cos(angle)))
    # Stretched to the unit square.
    left, top = (min(point[axis] for point in points) for axis in (0, 1))
    right, bottom = (max(point[axis] for point in points) for axis in (0, 1))
    return [((x - left) / (right - left), (y - top) / (bottom - top)) for x, y in points]


_ARM = 1 / 3
_UNIT_OUTLINES: dict[str, list[Point]] = {
    "square": [(0, 0), (1, 0), (1, 1), (0, 1)],
    "triangle": [(0.5, 0), (1, 1), (0, 1)],
    "cross": [
        (_ARM, 0),
        (1 - _ARM, 0),
        (1 - _ARM, _ARM),
        (1, _ARM),
        (1, 1 - _ARM),
        (1 - _ARM, 1 - _ARM),
        (1 - _ARM, 1),
        (_ARM, 1),
        (_ARM, 1 - _ARM),
        (0, 1 - _ARM),
        (0, _ARM),
        (_ARM, _ARM),
    ],
    "star": _star(),
}
