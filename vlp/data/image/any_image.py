"""Images in the forms that people have them in, as PIL images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from vlp.data.image.decode import decode_image
from vlp.data.limits import MAX_IMAGE_BYTES
from vlp.data.shards.sample_files import BadSample
from vlp.io import redacted

ACCEPTED = "give a path, a PIL image, an array or a tensor, or a list of these"


def as_images(given: Any) -> list[Image.Image]:
    """Return one image or several as PIL images.

    Args:
        given: a path; a PIL image; an array (height, width), (height, width, 1, 3 or 4) or
            (3, height, width); a tensor (3, height, width); levels, also of a PIL image of mode F
            or I, are 0..255 in whole numbers or 0..1 in fractions; several in an array or tensor of
            4 axes, or in a list.

    Raises:
        TypeError: it is something else.
        ValueError: of another shape, out of range, or there is none.
        FileNotFoundError: there is no such file.
        OSError: a file is no image that can be decoded.
    """
    many = isinstance(given, list | tuple) or getattr(given, "ndim", 0) == 4
    images = [as_image(one) for one in (given if many else [given])]
    if not images:
        raise ValueError(f"images is empty; {ACCEPTED}")
    return images


def as_image(given: Any) -> Image.Image:
    """Return one image, given as `as_images` takes it, as a PIL image.

    Raises:
        TypeError, ValueError, OSError: as `as_images` raises them.
    """
    if isinstance(given, Image.Image):
        # Of F Pillow has levels up to 255, of I 16 bits, and others make fractions and bytes.
        most = {"F": 1, "I": 255 if given.format is None else 0}.get(given.mode)
        if most is None:
            return given
        array = np.asarray(given)
        return given if array.size and array.max() > most else _of_array(array)
    if isinstance(given, str | os.PathLike):
        if "://" in (text := os.fspath(given)):
            raise ValueError(f"an image is the URL {redacted(text)}; download it and give its path")
        return _opened(Path(given))
    if isinstance(given, Tensor):
        given = given.detach().cpu()
        array = (given.float() if given.is_floating_point() else given).numpy()
    elif isinstance(given, np.ndarray):
        array = given
    else:
        raise TypeError(f"an image is of type {type(given).__name__}; {ACCEPTED}")
    return _of_array(array)


def _opened(file: Path) -> Image.Image:
    try:
        with file.open("rb") as content:
            return decode_image(content.read(MAX_IMAGE_BYTES + 1), str(file))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no image file {file}") from None
    except BadSample as error:
        raise OSError(f"this image cannot be used: {error}") from error


def _of_array(array: np.ndarray) -> Image.Image:
    shape = array.shape
    if array.ndim == 3 and shape[0] in (1, 3) and shape[2] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if (
        array.ndim not in (2, 3)
        or (array.ndim == 3 and array.shape[2] not in (3, 4))
        or not (array.size)
    ):
        raise ValueError(
            f"an image has shape {shape}; give (height, width, 3), (3, height, width) or "
            "(height, width)"
        )
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * np.uint8(255)
    low, high = float(array.min()), float(array.max())
    fractions = np.issubdtype(array.dtype, np.floating)
    most = 1 if fractions else 255
    if not (low >= 0 and high <= most):
        raise ValueError(
            f"an image of {array.dtype} holds levels from {low:g} to {high:g}; give whole numbers "
            "in 0..255 or fractions in 0..1, not normalised"
        )
    levels = (array * 255).round() if fractions else array
    return Image.fromarray(levels.astype(np.uint8))
