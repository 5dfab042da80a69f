"""Encoded images to upright RGB, refusing what is too large or cannot be decoded whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

import numpy as np
from PIL import ExifTags, Image

from vlp.data.limits import MAX_ASPECT, MAX_IMAGE_BYTES, MAX_SCAN_PIXELS, MAX_SIDE, limits
from vlp.data.shards.sample_files import BadSample

# Whatever the file is called. Pillow knows many more; some run other programs (EPS), none is met in
# the corpora.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")

# Of more EXIF, Pillow would copy nearly all of it for each of its fields.
_EXIF = frozenset(("exif", "Raw profile type exif"))
_MOST_EXIF = 2**16

# Pillow walks through the parts around the pixels in Python, one by one.
_MOST_READS_OF_HEADER, _MOST_READS = 2**11, 2**16

_ROWS = 256

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


def decode_image(data: bytes, where: str, least: int | None = None) -> Image.Image:
    """Decode an image wholly, to RGB, as a viewer shows it.

    It is turned by its EXIF orientation, so boxes are in pixels of the upright image. What is
    transparent shows white; 16 bits become their upper 8; of an animation the first image is
    taken. The format is found in the bytes: a PNG that is called .jpg decodes.

    Args:
        data: the bytes.
        where: names the place in errors.
        least: pixels that both sides must keep. A JPEG then comes at 1/2, 1/4 or 1/8 of its size
            where that is enough, straight from its low frequencies and without its full size in
            memory; other formats, and smaller images, come as they are.

    Raises:
        BadSample: the bytes are no image of FORMATS, or end too early (a truncated JPEG would
            otherwise come out with a grey lower part); or it is beyond `vlp.data.limits`, which is
            said before memory or time are spent on it.
    """
    with reading(where), open_image(data, where) as image:
        if least is not None:
            image.draft(None, (least, least))
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
        BadSample: the image is beyond `vlp.data.limits`. Bytes that are no image raise whatever the
            decoder does: see `reading`.
    """
    if len(data) > MAX_IMAGE_BYTES:
        raise _too_large(where, f"more than {MAX_IMAGE_BYTES} bytes")
    file = _Metered(data)
    image = Image.open(file, formats=FORMATS)
    file.reads_left = _MOST_READS
    width, height = image.size
    shown = f"{width} x {height} pixels"
    if width * height > limits().pixels:
        raise _too_large(where, f"{shown}, more than limits.pixels {limits().pixels}")
    if max(width, height) > min(MAX_SIDE, MAX_ASPECT * min(width, height)):
        raise _too_large(where, f"{shown}, too long a side")
    # Among coded pixels a byte 255 is followed by zero, so this counts every start of a scan.
    if image.format == "JPEG" and data.count(b"\xff\xda") * width * height > MAX_SCAN_PIXELS:
        raise _too_large(where, f"{shown} in too many scans")
    return image


class _Metered(BytesIO):
    """Bytes of an image that end Pillow's reading where it would take minutes or gigabytes."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.reads_left, self._exif_left = _MOST_READS_OF_HEADER, _MOST_EXIF

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        self.reads_left -= 1
        if content.startswith(b"Exif\0\0"):
            self._exif_left -= len(content)
        if min(self.reads_left, self._exif_left) < 0:
            raise Image.DecompressionBombError("more parts, or more EXIF, than can be followed")
        return content


def _too_large(where: str, what: str) -> BadSample:
    return BadSample("image too large", f"{where} ({what})")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # Pillow would clip all but the darkest 256 of the 65,536 levels to white.
        grey = Image.new("L", image.size)
        for top in range(0, image.height, _ROWS):  # all at once would take five copies
            rows = np.asarray(image.crop((0, top, image.width, min(top + _ROWS, image.height))))
            levels = (rows.astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
            grey.paste(Image.fromarray(levels), (0, top))
        return grey.convert("RGB")
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
        if image.format == "PNG" and "exif" not in image.info:
            image.load()  # it may stand behind the pixels
        for name in _EXIF.intersection(image.info):
            image.info[name] = image.info[name][:_MOST_EXIF]
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # garbage beside the pixels does not make the image a bad one
        return 1


def _upright(image: Image.Image, turn: int) -> Image.Image:
    if turn in TURNS:
        image = image.transpose(TURNS[turn])
    image.info = {}  # with the orientation in it, the next reader would turn the image again
    return image
