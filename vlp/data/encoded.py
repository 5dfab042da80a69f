"""A picture whose size is known before it is decoded, so that a crop can be chosen first."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from simplejpeg import decode_jpeg
from torch import Tensor

from vlp.data.pictures import TURNS, decode_picture, open_picture, orientation, reading

# Those that swap width and height.
_SIDEWAYS = (5, 6, 7, 8)


class EncodedPicture:
    """An encoded picture, of which the header alone has been read.

    Args:
        data: the bytes.
        where: names the place in errors.

    Raises:
        BadSample: as `vlp.data.pictures.decode_picture`; the methods too.
    """

    def __init__(self, data: bytes, where: str) -> None:
        self._data, self._where = data, where
        with reading(where), open_picture(data, where) as image:
            turn = orientation(image)
            # Nothing is left for Pillow to do.
            self._plain = (
                image.format == "JPEG" and image.mode in ("L", "RGB") and turn not in TURNS
            )
            width, height = image.size
        self.size = (height, width) if turn in _SIDEWAYS else (width, height)
        """(width, height) in pixels, upright."""

    def image(self) -> Image.Image:
        """Decoded by `decode_picture`."""
        return decode_picture(self._data, self._where)

    def levels(self, least: tuple[int, int] = (0, 0)) -> Tensor:
        """Decoded to levels, (3, height, width) uint8: those of `image`, or of a smaller one.

        Args:
            least: (width, height) that the result must have; 0 is the picture's own. A JPEG is
                decoded at 1/2, 3/8, 1/4 or 1/8 of its size, the smallest that has them, straight
                from its low frequencies; everything else at full size.
        """
        if self._plain:
            try:
                # The levels of Pillow's decoder, without its fourth byte per pixel and its copies.
                # From a factor of 2 on, reduced decoding also saves time.
                data = decode_jpeg(
                    self._data, min_width=least[0], min_height=least[1], min_factor=2
                )
                return torch.from_numpy(data).permute(2, 0, 1)
            except ValueError:
                pass  # damaged somewhere: what is bad and what can pass is for Pillow to say
        return levels_of(self.image())


def levels_of(image: Image.Image) -> Tensor:
    """An RGB picture's levels, (3, height, width) uint8."""
    return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1)
