"""One original image as it is stored: checked, upright, not too large.

The bytes stay as they are unless the image is turned by its EXIF orientation, larger than wanted,
or of a format that shards do not hold (GIF, BMP).
"""

from __future__ import annotations

from io import BytesIO
from typing import NamedTuple

from PIL import Image

from vlp.data.image.decode import TURNS, decode_image, open_image, orientation, reading

_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}


class Prepared(NamedTuple):
    """An encoded image as it is stored."""

    data: bytes
    extension: str
    size: tuple[int, int]
    """Width and height in pixels."""
    original: tuple[int, int]
    """Width and height that the header of the original says, before it is turned."""
    orientation: int = 1
    """Of the original, by EXIF: 1 (upright) to 8; from 5 on width and height are exchanged."""


def prepare_image(data: bytes, where: str, max_side: int | None, quality: int) -> Prepared:
    """Check an image wholly and re-encode it where it must be.

    Args:
        data: the encoded image.
        where: its name, for the message.
        max_side: longest side in pixels; a larger one is reduced (Lanczos). None: no limit.
        quality: of re-encoded images, which become JPEG; PNG stays PNG.

    Raises:
        BadSample: it is no image, ends too early, or is beyond `vlp.data.limits`.
    """
    with reading(where), open_image(data, where) as image:
        original, turn = image.size, orientation(image)
        turn = turn if turn in TURNS else 1
        kind = _EXTENSIONS.get(image.format or "")
        reduced = max_side is not None and max(image.size) > max_side
        if kind is not None and turn == 1 and not reduced:
            # Of a JPEG at an eighth of its size every byte is still read, in less time.
            image.draft("RGB", (image.width // 8 + 1, image.height // 8 + 1))
            image.load()
            return Prepared(data, kind, original, original)
    stored = decode_image(data, where)
    if max_side is not None and reduced:
        stored = stored.resize(_fitted(stored.size, max_side), Image.Resampling.LANCZOS)
    stream = BytesIO()
    if kind == "png":
        stored.save(stream, "PNG")
    else:
        kind = "jpg"
        stored.save(stream, "JPEG", quality=quality)
    return Prepared(stream.getvalue(), kind, stored.size, original, turn)


def _fitted(size: tuple[int, int], max_side: int) -> tuple[int, int]:
    scale = max_side / max(size)
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
