"""The parts of an encoded image, checked before a decoder goes through them.

Pixels are decoded by C libraries, but the parts around them by Python, one by one, and a scan of a
progressive JPEG is a few bytes that touch every pixel. What is refused here would cost minutes or
gigabytes.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from vlp.data.limits import beyond, limits
from vlp.data.shards.sample_files import BadSample

# Of a JPEG: its first bytes, what decoders pass over before a marker, markers that stand alone,
# those of tables (not of a frame) among the markers of frames, and those that say nothing here.
JPEG = b"\xff\xd8\xff"
_RUBBISH = re.compile(rb"(?:[^\xff]|\xff\0){0,64}\xff{1,64}[^\0\xff]", re.DOTALL)
_ALONE = frozenset((0x01, *range(0xD0, 0xD9)))
_NO_FRAME = frozenset((0xC4, 0xC8, 0xCC))
_PASSED = frozenset((0xC4, 0xDB, 0xDD, 0xE0, *range(0xE2, 0xF0), 0xFE))
_PROGRESSIVE, _ARITHMETIC, _SCAN, _APP1 = 0xC2, 0xC9, 0xDA, 0xE1
_ORIENTED = (b"Exif\0\0", b"tiff:Orientation")

# More than any camera or editor writes. Pillow takes microseconds for each, and EXIF may say of any
# number of its fields that each is nearly all of it.
_MOST_SEGMENTS, _MOST_CHUNKS, _MOST_BLOCKS = 256, 2**15, 2**14
MOST_EXIF = 2**16

MANY_SCAN_PIXELS = 2**28
"""Pixels of a JPEG times its scans that take a second; the number is exact from here on."""

# Whatever the parts of a file are, Pillow is through with so few bytes in no time.
_SMALL = 2**18


def check_parts(data: bytes, where: str) -> None:
    """Require that an image's parts can be gone through at once.

    Raises:
        BadSample: there are too many, or too large ones.
    """
    size = len(data)
    if data.startswith(JPEG):
        jpeg_parts(data, where)
    elif size > limits().image_bytes:
        raise too_large(where, f"{size} bytes, {beyond('image_bytes')}")
    elif data.startswith(b"\x89PNG"):
        _check_png(data, where)
    elif size > _SMALL and data.startswith(b"GIF"):
        _check_gif(data, where)
    elif size > _SMALL and data.startswith(b"BM") and _has_run_lengths(data):
        # Pillow unpacks it byte by byte.
        raise too_large(where, f"a BMP of run lengths of {size} bytes")


def check_size(width: int, height: int, where: str, share: float = 1.0) -> None:
    """Require a size within the limits.

    Args:
        width: in pixels.
        height: in pixels.
        where: names the place in errors.
        share: of the pixels that are within them, for a format that takes more copies.

    Raises:
        BadSample: it is not.
    """
    most = limits()
    if width * height > most.pixels * share:
        part = f" x {share}" if share < 1 else ""
        raise too_large(where, f"{width} x {height} pixels, {beyond('pixels')}{part}")
    long, short = max(width, height), min(width, height)
    if long > most.side or long > most.aspect * short:
        key = "side" if long > most.side else "aspect"
        raise too_large(where, f"{width} x {height} pixels, too long a side: {beyond(key)}")


class JpegParts(NamedTuple):
    """What a JPEG's segments say: perhaps how to turn it, and its pixels times its scans."""

    may_be_turned: bool
    scan_pixels: int = 0


def jpeg_parts(data: bytes, where: str) -> JpegParts:
    """Go through a JPEG's segments.

    Raises:
        BadSample: segments or scans are too many or too large, or it is coded arithmetically.
    """
    if (size := len(data)) > limits().image_bytes:
        raise too_large(where, f"{size} bytes, {beyond('image_bytes')}")
    start, pixels, colours, exif, turned, progressive = 2, 0, 0, 0, False, False
    for _ in range(_MOST_SEGMENTS):
        place = start + 4
        if place > size or data[start] != 0xFF or not 0 < data[start + 1] < 0xFF:
            found = _RUBBISH.match(data, start)
            if found is None:
                break
            place = found.end() + 2
        marker = data[place - 3]
        if marker in _ALONE:
            start = place - 2
            continue
        start = place - 2 + int.from_bytes(data[place - 2 : place])
        if marker in _PASSED:
            continue
        if marker == _SCAN:
            several = progressive or data[place : place + 1] < bytes([colours])
            return JpegParts(turned, _scans(data, pixels, where) if several else pixels)
        if marker == _APP1:
            exif += (start - place) * data.startswith(b"Exif", place)
            if exif > MOST_EXIF:
                raise too_large(where, f"{exif} bytes of EXIF")
            turned = turned or any(data.find(mark, place, start) >= 0 for mark in _ORIENTED)
        elif 0xC0 <= marker <= 0xCF and marker not in _NO_FRAME:
            if marker >= _ARITHMETIC:
                raise BadSample("unreadable image", f"{where} (a JPEG of arithmetic coding)")
            progressive = progressive or marker == _PROGRESSIVE
            height, width = data[place + 1 : place + 3], data[place + 3 : place + 5]
            pixels = max(pixels, int.from_bytes(height) * int.from_bytes(width))
            colours = data[place + 5] if place + 5 < len(data) else 0
    if size > _SMALL:
        raise too_large(where, "more segments than can be followed")
    return JpegParts(may_be_turned=True)


def too_large(where: str, what: str) -> BadSample:
    """Return the error of an image beyond a limit."""
    return BadSample("image too large", f"{where} ({what})")


def _scans(data: bytes, pixels: int, where: str) -> int:
    # Behind a byte 255 of coded pixels there is always a zero, so none is missed; a thumbnail's
    # scans count too.
    most = limits().scan_pixels
    scans = data.count(_SCAN)  # a bound, in a thirtieth of the time
    if scans * pixels > min(most, MANY_SCAN_PIXELS):
        values = np.frombuffer(data, np.uint8)
        scans = int(np.count_nonzero((values[:-1] == 0xFF) & (values[1:] == _SCAN)))
    if scans * pixels > most:
        raise too_large(where, f"{scans} scans of {pixels} pixels, {beyond('scan_pixels')}")
    return scans * pixels


def _check_png(data: bytes, where: str) -> None:
    place = 8
    for _ in range(_MOST_CHUNKS):
        place += 12 + int.from_bytes(data[place : place + 4])
        if place >= len(data):
            return
    raise too_large(where, f"more than {_MOST_CHUNKS} chunks")


def _check_gif(data: bytes, where: str) -> None:
    flags = data[10]
    place = 13 + (3 * 2 ** (flags % 8 + 1) if flags >= 128 else 0)  # a palette
    blocks = 0
    while blocks < _MOST_BLOCKS and data[place : place + 1] == b"!":
        place += 2
        while blocks < _MOST_BLOCKS and (size := int.from_bytes(data[place : place + 1])):
            place, blocks = place + size + 1, blocks + 1
        place, blocks = place + 1, blocks + 1
    if data[place : place + 1] != b",":
        raise too_large(where, "more blocks before the image than can be followed")


def _has_run_lengths(data: bytes) -> bool:
    return int.from_bytes(data[30:34], "little") in (1, 2)
