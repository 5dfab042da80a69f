from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from raw_images import raw_image

from data_tools.builder.write_shard import Prepared, prepare_image
from vlp.data.image.decode import decode_image
from vlp.data.limits import Limits
from vlp.data.shards.sample_files import BadSample


def prepared(data: bytes, max_side: int | None = None) -> Prepared:
    return prepare_image(data, "it", max_side, 90)


def opened(image: Prepared) -> Image.Image:
    return Image.open(io.BytesIO(image.data))


def turned(orientation: int, size: tuple[int, int] = (24, 16)) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return raw_image(orientation, size, exif=exif, quality=95)


@pytest.mark.parametrize(
    ("kind", "extension"), [("jpeg", "jpg"), ("png", "png"), ("webp", "webp"), ("mpo", "jpg")]
)
def test_what_a_shard_can_hold_stays_as_it_is(kind: str, extension: str) -> None:
    data = raw_image(1, kind=kind)
    assert prepared(data) == Prepared(data, extension, (24, 16), (24, 16))


@pytest.mark.parametrize("kind", ["gif", "bmp"])
def test_other_formats_become_jpeg(kind: str) -> None:
    image = prepared(raw_image(1, kind=kind))
    assert (image.extension, image.size) == ("jpg", (24, 16))
    assert opened(image).format == "JPEG"


@pytest.mark.parametrize("orientation", range(2, 9))
def test_turned_images_are_stored_upright(orientation: int) -> None:
    data = turned(orientation)
    image = prepared(data)
    assert image.size == ((16, 24) if orientation > 4 else (24, 16))
    assert 0x0112 not in opened(image).getexif()
    shown = np.asarray(decode_image(data, ""), dtype=float)
    stored = np.asarray(decode_image(image.data, ""), dtype=float)
    assert np.abs(shown - stored).mean() < 25  # noise written as JPEG again
    flipped = np.abs(shown[::-1] - stored).mean()
    assert flipped > 2 * np.abs(shown - stored).mean()


def test_garbage_exif_is_no_fault() -> None:
    data = raw_image(1, exif=b"Exif\x00\x00garbage")
    assert prepared(data).data == data


@pytest.mark.parametrize(
    ("size", "max_side", "expected"),
    [((200, 100), 50, (50, 25)), ((1, 200), 20, (1, 20)), ((50, 20), 50, (50, 20))],
)
def test_reduced_to_the_longest_side(
    size: tuple[int, int], max_side: int, expected: tuple[int, int]
) -> None:
    for kind, extension in (("jpeg", "jpg"), ("png", "png"), ("webp", "jpg")):
        data = raw_image(1, size, kind)
        image = prepared(data, max_side)
        assert image.size == opened(image).size == expected
        assert (image.data == data) == (size == expected)
        if size != expected:
            assert image.extension == extension


@pytest.mark.parametrize("share", [0.3, 0.7, 0.99])
@pytest.mark.parametrize("how", [{}, {"progressive": True}])
def test_a_cut_jpeg_is_noticed_though_only_an_eighth_is_decoded(share: float, how: dict) -> None:
    data = raw_image(1, (320, 200), **how)
    prepared(data)
    with pytest.raises(BadSample, match="unreadable image"):
        prepared(data[: int(len(data) * share)])


def test_what_is_no_image() -> None:
    for data in (b"", b"text", b"<svg/>", raw_image(1, kind="tiff")):
        with pytest.raises(BadSample, match="unreadable image: it"):
            prepared(data)


def test_absurd_dimensions_are_refused_by_the_header() -> None:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    for side in (8193, 60000, 2**31 - 1):
        header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
        data = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
        assert side * side > Limits().pixels
        with pytest.raises(BadSample, match="image too large"):
            prepared(data)
