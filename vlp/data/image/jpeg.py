"""An image whose size is known before it is decoded, so that a crop can be chosen first."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from simplejpeg import decode_jpeg
from torch import Tensor

from vlp.data.image.decode import TURNS, decode_image, open_image, orientation, reading

# Those that swap width and height.
_SIDEWAYS = (5, 6, 7, 8)


class JpegImage:
    """An encoded image of any format, of which the header alone has been read.

    Args:
        data: the bytes.
        where: names the place in errors.

    Raises:
        BadSample: as `decode_image`; the methods too.
    """

    def __init__(self, data: bytes, where: str) -> None:
        self._data, self._where = data, where
        with reading(where), open_image(data, where) as image:
            turn = orientation(image)
            # Nothing is left for Pillow to do.
            self._plain = (
                image.format == "JPEG" and image.mode in ("L", "RGB") and turn not in TURNS
            )
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


def levels_of(image: Image.Image) -> Tensor:
    """Return an RGB image's levels, (3, height, width) uint8."""
    return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1)
