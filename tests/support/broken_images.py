"""Encoded images, good ones and such as are broken on purpose."""

import io
import struct
import zlib

import numpy as np
from PIL import Image


def photo(kind="png", size=(20, 16), seed=0, mode="RGB", **how):
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    stream = io.BytesIO()
    small.resize(size, Image.Resampling.BILINEAR).convert(mode).save(stream, kind, **how)
    return stream.getvalue()


def chunk(kind, content):
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def packed_zeros(count):
    packer = zlib.compressobj(1)
    parts = [packer.compress(bytes(min(2**20, count - done))) for done in range(0, count, 2**20)]
    return b"".join(parts) + packer.flush()


def png_of(width, height, *chunks, zeros=1000):
    """A PNG of any size in its header, and so many bytes of black in it."""
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        + b"".join(chunks)
        + chunk(b"IDAT", packed_zeros(zeros))
        + chunk(b"IEND", b"")
    )


def bombs():
    """Small files of every format whose headers announce more pixels than memory holds."""
    jpeg = bytearray(photo("jpeg"))
    place = jpeg.index(b"\xff\xc0")
    jpeg[place + 5 : place + 9] = struct.pack(">HH", 65500, 65500)
    progressive = bytearray(photo("jpeg", progressive=True))
    place = progressive.index(b"\xff\xc2")
    progressive[place + 5 : place + 9] = struct.pack(">HH", 60000, 60000)
    gif = bytearray(photo("gif"))
    gif[6:10] = struct.pack("<HH", 65535, 65535)
    bmp = bytearray(photo("bmp"))
    bmp[18:26] = struct.pack("<ii", 100_000, 100_000)
    return {
        "png": png_of(100_000, 100_000),
        "png just too large": png_of(8193, 8192),
        "png below the limit of Pillow": png_of(9400, 9400),
        "jpeg": bytes(jpeg),
        "progressive jpeg": bytes(progressive),
        "gif": bytes(gif),
        "bmp": bytes(bmp),
        "webp": _webp_of(16383, 16383),
        "webp below the limit of Pillow": _webp_of(9400, 9400),
    }


def _webp_of(width, height):
    """An animation: a still image that is smaller than its canvas is refused as damaged."""
    frame = photo("webp", lossless=True)[12:]
    extent = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    canvas = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + extent
    control = b"ANIM" + struct.pack("<I", 6) + bytes(6)
    sides = struct.pack("<I", 19)[:3] + struct.pack("<I", 15)[:3]
    placed = bytes(6) + sides + bytes(4) + frame
    body = b"WEBP" + canvas + control + b"ANMF" + struct.pack("<I", len(placed)) + placed
    return b"RIFF" + struct.pack("<I", len(body)) + body
