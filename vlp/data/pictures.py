"""Encoded pictures to RGB, refusing what cannot be decoded whole."""

from __future__ import annotations

from io import BytesIO

from PIL import Image

from vlp.data.stored import BadSample


def decode_picture(data: bytes, where: str) -> Image.Image:
    """Decode a picture wholly, to RGB.

    Raises:
        BadSample: the bytes are no picture, or end too early (a truncated JPEG would otherwise
            come out with a grey lower part).
    """
    try:
        with Image.open(BytesIO(data)) as image:
            image.load()
            return image.convert("RGB")
    except Exception as error:  # decoders raise a dozen kinds for bad bytes; all mean the same
        raise BadSample("unreadable picture", f"{where} ({error})") from error
