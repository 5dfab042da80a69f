"""An image whose size is known before it is decoded, so that a crop can be chosen first."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from simplejpeg import decode_jpeg, decode_jpeg_header
from torch import Tensor

from vlp.data.image.decode import TURNS, decode_image, open_image, orientation, reading
from vlp.data.image.header import JPEG, MANY_SCAN_PIXELS, check_size, jpeg_parts

# Those that swap width and height.
_SIDEWAYS = (5, 6, 7, 8)


class JpegImage:
    """An encoded image, of which the header alone has been read.

    Args:
        data: the bytes.
        where: names the place in errors.

    Raises:
        BadSample: as `vlp.data.image.decode.decode_image`; the methods too.
    """

    def __init__(self, data: bytes, where: str) -> None:
        self._data, self._where = data, where
        size = _plain_size(data, where)
        if size is not None:
            self._plain, self.size = True, size
            return
        with reading(where), open_image(data, where) as image:
            turn = orientation(image)
            # Nothing is left for Pillow to do.
            plain = image.format == "JPEG" and image.mode in ("L", "RGB") and turn not in TURNS
            self._plain = plain and jpeg_parts(data, where).scan_pixels <= MANY_SCAN_PIXELS
            width, height = image.size
        self.size = (height, width) if turn in _SIDEWAYS else (width, height)
        """(width, height) in pixels, upright."""

    def image(self) -> Image.Image:
        """Decode with `decode_image`."""
        return decode_image(self._data, self._where)

    def levels(self, least: tuple[int, int] | None = None) -> Tensor:
        """Decode to levels, (3, height, width) uint8: those of `image`, or quicker ones.

        Args:
            least: (width, height) that must be left, for a quick result: a JPEG is decoded by the
                less exact transforms (1 level off on average), and at 1/2, 3/8, 1/4 or 1/8 of its
                size, the smallest that leaves so much, straight from its low frequencies (3 levels
                off once resized). None is exact.
        """
        if self._plain:
            try:
                # The levels of Pillow's decoder, without its fourth byte per pixel and its copies.
                # From a factor of 2 on, reduced decoding also saves time.
                quick = least is not None
                width, height = least or (0, 0)
                data = decode_jpeg(
                    self._data,
                    fastdct=quick,
                    fastupsample=quick,
                    min_width=width,
                    min_height=height,
                    min_factor=2,
                )
                return torch.from_numpy(data).permute(2, 0, 1)
            except ValueError:
                pass  # damaged somewhere: what is bad and what can pass is for Pillow to say
        return levels_of(self.image())


def _plain_size(data: bytes, where: str) -> tuple[int, int] | None:
    """Return a plain JPEG's (width, height); None leaves any other image to Pillow."""
    # A tenth of the time that Pillow takes for it, which also builds tables for its own decoder.
    if not data.startswith(JPEG):
        return None
    parts = jpeg_parts(data, where)
    # Many are Pillow's from the start, which would have to begin again where the quicker decoder
    # finds damage at the end.
    if parts.may_be_turned or parts.scan_pixels > MANY_SCAN_PIXELS:
        return None
    try:
        height, width, colours, _ = decode_jpeg_header(data)
    except ValueError:
        return None
    check_size(width, height, where)
    return (width, height) if colours in ("YCbCr", "RGB", "Gray") and width and height else None


def levels_of(image: Image.Image) -> Tensor:
    """Return an RGB image's levels, (3, height, width) uint8."""
    return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1)
