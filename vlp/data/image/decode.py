"""Encoded images to upright RGB, refusing what is too large or cannot be decoded whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

import numpy as np
from PIL import ExifTags, Image

from vlp.data.shards.sample_files import BadSample

# 8,192 x 8,192, more than the usual corpora hold. Pillow spends 4 bytes on a pixel of most modes
# and needs up to three copies for a while (a WebP four): 1 GiB at most.
MAX_PIXELS = 2**26

# Whatever the file is called. Pillow knows many more; some run other programs (EPS), none is met in
# the corpora.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")

# EXIF orientation, to what puts the image upright.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_image(data: bytes, where: str) -> Image.Image:
    """Decode an image wholly, to RGB, as a viewer shows it.

    It is turned by its EXIF orientation, so boxes are in pixels of the upright image. What is
    transparent shows white; 16 bits become their upper 8; of an animation the first image is
    taken. The format is found in the bytes: a PNG that is called .jpg decodes.

    Raises:
        BadSample: the bytes are no image of FORMATS, or end too early (a truncated JPEG would
            otherwise come out with a grey lower part); or its header announces more than
            MAX_PIXELS, which is said before any memory is spent on them.
    """
    with reading(where), open_image(data, where) as image:
        image.load()
        return _upright(_to_rgb(image), orientation(image))


def upright_rgb(image: Image.Image) -> Image.Image:
    """Return an image that others opened as `decode_image` does; one that is so already as is.

    Raises:
        OSError: the file ends too early, or cannot be decoded.
    """
    image.load()
    turn = orientation(image)
    if image.mode == "RGB" and turn not in TURNS and not image.has_transparency_data:
        return image
    return _upright(_to_rgb(image), turn)


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Turn whatever a decoder raises within into a `BadSample` that names the place."""
    try:
        yield
    except BadSample:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadSample("image too large", f"{where} ({error})") from error
    except Exception as error:  # decoders raise a dozen kinds for bad bytes; all mean the same
        raise BadSample("unreadable image", f"{where} ({error})") from error


def open_image(data: bytes, where: str) -> Image.Image:
    """Read the header alone.

    Raises:
        BadSample: it announces more than MAX_PIXELS. Bytes that are no image raise whatever the
            decoder does: see `reading`.
    """
    image = Image.open(BytesIO(data), formats=FORMATS)
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadSample("image too large", f"{where} ({width} x {height} pixels)")
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # Pillow would clip all but the darkest 256 of the 65,536 levels to white.
        levels = np.asarray(image).astype(np.int64) >> 8
        return Image.fromarray(levels.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        # What transparent pixels hold as their colour is anything, mostly black.
        white = Image.new("RGB", image.size, "white")
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        white.paste(image, mask=image)
        return white
    return image.convert("RGB")


def orientation(image: Image.Image) -> int:
    """Return EXIF's number of the way an image must be turned; 1 is upright."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # garbage beside the pixels does not make the image a bad one
        return 1


def _upright(image: Image.Image, turn: int) -> Image.Image:
    if turn in TURNS:
        image = image.transpose(TURNS[turn])
    image.info = {}  # with the orientation in it, the next reader would turn the image again
    return image
