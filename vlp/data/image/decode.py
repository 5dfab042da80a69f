"""Decoding of images to upright RGB; damaged and too large ones are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError
from simplejpeg import decode_jpeg

from vlp.data.limits import MAX_ASPECT, MAX_IMAGE_BYTES, MAX_SCAN_PIXELS, MAX_SIDE, limits
from vlp.data.shards.sample_files import BadSample
from vlp.io import redact

if TYPE_CHECKING:
    from torch import Tensor

# Detected by content. Pillow's other formats are not used by corpora, and some run programs (EPS).
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")

_EXIF = frozenset(("exif", "Raw profile type exif"))  # keys of `Image.info`
_MAX_EXIF = 2**16  # bytes, as Pillow copies most of the EXIF for each field

# Limits of Pillow's reads of a header and of a file: it parses chunks one by one in Python.
_MAX_HEADER_READS, _MAX_READS = 2**11, 2**16

_ROWS_AT_ONCE = 256

_PNG = b"\x89PNG\r\n\x1a\n"
_TEXT_CHUNKS = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
_ORIENTATION_CHUNKS = (b"Raw profile type exif", b"XML:com.adobe.xmp")

# Transposition that puts an image upright, by EXIF orientation.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_image(data: bytes, where: str, min_size: int | None = None) -> Image.Image:
    """Decode an image to upright RGB; BadSample if truncated or beyond `vlp.data.limits`.

    Transparent pixels become white, 16 bits their upper 8, an animation its first frame. With
    `min_size` a JPEG is decoded at 1/2, 1/4 or 1/8 of its size if both sides keep `min_size`
    pixels. `where` is the image's location for messages.
    """
    with decoder_errors(where), open_image(data, where) as image:
        if min_size is not None:
            image.draft(None, (min_size, min_size))
        image.load()  # raises for a truncated JPEG; `convert` alone would leave a grey lower part
        return _upright(_to_rgb(image), orientation(image))


def upright_rgb(image: Image.Image) -> Image.Image:
    """Convert an opened image as `decode_image` does; upright RGB is returned unchanged."""
    image.load()
    turn = orientation(image)
    if image.mode == "RGB" and turn not in TURNS and not image.has_transparency_data:
        return image
    return _upright(_to_rgb(image), turn)


@contextmanager
def decoder_errors(where: str) -> Iterator[None]:
    """Convert any error of a decoder to a BadSample with the location `where`."""
    try:
        yield
    except BadSample:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadSample("image too large", f"{where} ({error})") from error
    except UnidentifiedImageError as error:
        message = f"{where} (damaged, or not {', '.join(FORMATS[:-1])} or {FORMATS[-1]})"
        raise BadSample("unreadable image", message) from error
    except Exception as error:  # decoders raise a dozen types for damaged images
        raise BadSample("unreadable image", f"{where} ({error})") from error


def open_image(data: bytes, where: str) -> Image.Image:
    """Open an image by its header; BadSample beyond `vlp.data.limits`, else the decoder's error."""
    if len(data) > MAX_IMAGE_BYTES:
        raise _too_large(where, f"more than {MAX_IMAGE_BYTES} bytes")
    file = _MeteredBytes(_without_text_chunks(data) if data.startswith(_PNG) else data)
    image = Image.open(file, formats=FORMATS)
    file.reads_left = _MAX_READS
    if image.format == "PNG" and "transparency" in image.info:
        _scale_transparency(image, depth=data[24])
    width, height = image.size
    shape = f"{width} x {height} pixels"
    if width * height > limits().pixels:
        raise _too_large(where, f"{shape}, more than limits.pixels {limits().pixels}")
    if max(width, height) > min(MAX_SIDE, MAX_ASPECT * min(width, height)):
        raise _too_large(where, f"{shape}, too long a side")
    # Among coded pixels a byte 255 is followed by zero, so this counts every start of a scan.
    if image.format == "JPEG" and data.count(b"\xff\xda") * width * height > MAX_SCAN_PIXELS:
        raise _too_large(where, f"{shape} in too many scans")
    return image


def _without_text_chunks(data: bytes) -> bytes:
    """Return a PNG without texts and profiles, which Pillow would unpack, but with orientation."""
    parts, start, position = [], 0, len(_PNG)
    for _ in range(_MAX_READS):
        kind = data[position + 4 : position + 8]
        end = position + 12 + int.from_bytes(data[position : position + 4])
        if kind in _TEXT_CHUNKS and not data.startswith(_ORIENTATION_CHUNKS, position + 8):
            parts.append(data[start:position])
            start = end
        if (position := end) >= len(data):
            break
    return b"".join([*parts, data[start:]]) if parts else data


def _scale_transparency(image: Image.Image, depth: int) -> None:
    """Scale the transparent level to 8 bits, as Pillow scales the pixels."""
    level = image.info["transparency"]
    if image.mode == "L" and depth in (2, 4):
        image.info["transparency"] = level * 255 // (2**depth - 1)
    elif image.mode == "RGB" and depth == 16:
        image.info["transparency"] = tuple(part >> 8 for part in level)


class _MeteredBytes(BytesIO):
    """Bytes of an image with a limit on reads, as Pillow takes minutes or gigabytes for some."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.reads_left, self._exif_left = _MAX_HEADER_READS, _MAX_EXIF

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        self.reads_left -= 1
        if content.startswith(b"Exif\0\0"):
            self._exif_left -= len(content)
        if min(self.reads_left, self._exif_left) < 0:
            raise Image.DecompressionBombError("too many chunks, or too much EXIF")
        return content


def _too_large(where: str, reason: str) -> BadSample:
    return BadSample("image too large", f"{where} ({reason})")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # Pillow would clip all but the darkest 256 of the 65,536 levels to white.
        grey = Image.new("L", image.size)
        for top in range(0, image.height, _ROWS_AT_ONCE):  # whole images would be copied five times
            bottom = min(top + _ROWS_AT_ONCE, image.height)
            rows = np.asarray(image.crop((0, top, image.width, bottom)))
            levels = (rows.astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
            levels[rows == image.info.get("transparency", -1)] = 255
            grey.paste(Image.fromarray(levels), (0, top))
        return grey.convert("RGB")
    if image.has_transparency_data:
        # The stored colour of transparent pixels is arbitrary, mostly black.
        white = Image.new("RGB", image.size, "white")
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        white.paste(image, mask=image)
        return white
    return image.convert("RGB")


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 (upright) also where it is missing or damaged."""
    try:
        if image.format == "PNG" and "exif" not in image.info:
            image.load()  # EXIF may follow the pixels
        for name in _EXIF.intersection(image.info):
            image.info[name] = image.info[name][:_MAX_EXIF]
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # an image with damaged metadata is not bad
        return 1


def _upright(image: Image.Image, turn: int) -> Image.Image:
    if turn in TURNS:
        image = image.transpose(TURNS[turn])
    image.info = {}  # the orientation in it would turn the image again
    return image


class EncodedImage:
    """An encoded image: its header is read at once, its pixels on demand; raises BadSample."""

    def __init__(self, data: bytes, where: str) -> None:
        self._data, self._where = data, where
        with decoder_errors(where), open_image(data, where) as image:
            turn = orientation(image)
            # simplejpeg decodes plain JPEGs to the same pixels as Pillow.
            self._is_plain_jpeg = (
                image.format == "JPEG" and image.mode in ("L", "RGB") and turn not in TURNS
            )
            width, height = image.size
        # (width, height) in pixels, upright; orientations 5 to 8 swap them.
        self.size = (height, width) if turn in TURNS and turn > 4 else (width, height)

    def image(self) -> Image.Image:
        """Decode by `decode_image`."""
        return decode_image(self._data, self._where)

    def decode(self, min_size: tuple[int, int] | None = None) -> Tensor:
        """Decode to a tensor (3, height, width) uint8.

        With `min_size` (width, height) a JPEG is decoded by faster transforms, at the smallest of
        1/2, 3/8, 1/4 or 1/8 of its size that covers `min_size`.
        """
        if self._is_plain_jpeg:
            try:
                # Pillow would give the same pixels, but by way of four bytes per pixel and copies.
                # The faster transforms are 1 level off on average, 3 after resizing. Reduced sizes
                # save time only from 1/2 on, hence `min_factor`.
                quick = min_size is not None
                width, height = min_size or (0, 0)
                data = decode_jpeg(
                    self._data,
                    fastdct=quick,
                    fastupsample=quick,
                    min_width=width,
                    min_height=height,
                    min_factor=2,
                )
                import torch  # takes a second; data tools read images without it

                return torch.from_numpy(data).permute(2, 0, 1)
            except ValueError:
                pass  # damaged: Pillow decides whether the image is bad
        return pil_to_tensor(self.image())


def pil_to_tensor(image: Image.Image) -> Tensor:
    """Return an RGB image as a tensor (3, height, width) uint8."""
    import torch  # takes a second; data tools read images without it

    return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1)


ACCEPTED = "give a path, a PIL image, an array or a tensor, or a list of these"


def as_images(inputs: Any) -> list[Image.Image]:
    """Return one image or several as PIL images; TypeError, ValueError or OSError if unreadable.

    An image is a path, a PIL image, an array (height, width[, 1, 3 or 4]) or (3, height, width), or
    a tensor (3, height, width); integers are in 0..255, floats in 0..1. Several images are a list,
    or an array or tensor with 4 axes.
    """
    many = isinstance(inputs, list | tuple) or getattr(inputs, "ndim", 0) == 4
    images = [as_image(image) for image in (inputs if many else [inputs])]
    if not images:
        raise ValueError(f"images is empty; {ACCEPTED}")
    return images


def as_image(image: Any) -> Image.Image:
    """Return one image, given as `as_images` takes it, as a PIL image."""
    if isinstance(image, Image.Image):
        # Pillow means 0..255 by mode F and 16 bits by mode I; images made of arrays may instead
        # hold fractions (F, up to 1) or bytes (I, up to 255).
        if image.mode == "F":
            max_level = 1
        elif image.mode == "I" and image.format is None:
            max_level = 255
        else:
            return image
        array = np.asarray(image)
        return image if array.size and array.max() > max_level else _from_array(array)
    if isinstance(image, str | os.PathLike):
        if "://" in (text := os.fspath(image)):
            raise ValueError(f"an image is the URL {redact(text)}; download it and give its path")
        return _read_file(Path(image))
    import torch

    if isinstance(image, torch.Tensor):
        image = image.detach().cpu()
        array = (image.float() if image.is_floating_point() else image).numpy()
    elif isinstance(image, np.ndarray):
        array = image
    else:
        raise TypeError(f"an image is of type {type(image).__name__}; {ACCEPTED}")
    return _from_array(array)


def _read_file(file: Path) -> Image.Image:
    try:
        with file.open("rb") as content:
            return decode_image(content.read(MAX_IMAGE_BYTES + 1), str(file))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no image file {file}") from None
    except BadSample as error:
        raise OSError(f"this image cannot be used: {error}") from error


def _from_array(array: np.ndarray) -> Image.Image:
    shape = array.shape
    if array.ndim == 3 and shape[0] in (1, 3) and shape[2] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    has_channels = array.ndim == 3 and array.shape[2] in (3, 4)
    if not array.size or not (array.ndim == 2 or has_channels):
        raise ValueError(
            f"an image has shape {shape}; give (height, width, 3), (3, height, width) or "
            "(height, width)"
        )
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * np.uint8(255)
    low, high = float(array.min()), float(array.max())
    is_float = np.issubdtype(array.dtype, np.floating)
    max_level = 1 if is_float else 255
    if not (low >= 0 and high <= max_level):
        raise ValueError(
            f"an image of {array.dtype} holds levels from {low:g} to {high:g}; give whole numbers "
            "in 0..255 or fractions in 0..1, not normalised"
        )
    levels = (array * 255).round() if is_float else array
    return Image.fromarray(levels.astype(np.uint8))
