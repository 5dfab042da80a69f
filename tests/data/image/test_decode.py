from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from broken_images import bombs, chunk, packed_zeros, photo, png_of
from PIL import Image, ImageOps

from vlp.data.image.decode import decode_image
from vlp.data.image.jpeg import JpegImage
from vlp.data.shards.sample_files import BadSample


def jpeg() -> bytes:
    rng = np.random.default_rng(0)
    stream = BytesIO()
    Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(stream, "jpeg")
    return stream.getvalue()


def saved(image: Image.Image, kind: str = "png", **how: object) -> bytes:
    stream = BytesIO()
    image.save(stream, kind, **how)
    return stream.getvalue()


def test_decoded_whole_and_to_rgb() -> None:
    image = decode_image(jpeg(), "here")
    assert (image.mode, image.size) == ("RGB", (64, 64))
    stream = BytesIO()
    image.convert("P").save(stream, "png")
    assert decode_image(stream.getvalue(), "here").mode == "RGB"


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1, 0.0])
def test_a_truncated_jpeg_is_refused(share: float) -> None:
    data = jpeg()
    with pytest.raises(BadSample) as bad:
        decode_image(data[: int(len(data) * share)], "shard-3.tar, key")
    assert bad.value.kind == "unreadable image"
    assert "shard-3.tar, key" in bad.value.where


def test_no_image_at_all() -> None:
    with pytest.raises(BadSample, match="unreadable image"):
        decode_image(b"<html>not found</html>", "x")


def fully(data: bytes) -> bytes:
    return decode_image(data, "x").tobytes()


def for_training(data: bytes) -> bytes:
    return JpegImage(data, "x").levels().numpy().tobytes()


def reduced(data: bytes) -> bytes:
    return JpegImage(data, "x").levels((1, 1)).numpy().tobytes()


def kind_of(data: bytes, decode: Callable[[bytes], bytes] = fully) -> str:
    with pytest.raises(BadSample) as bad:
        decode(data)
    return bad.value.kind


@pytest.mark.parametrize("decode", [fully, for_training, reduced])
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("jpeg", {}),
        ("jpeg", {"progressive": True}),
        ("jpeg", {"mode": "L"}),
        ("png", {}),
        ("webp", {}),
        ("webp", {"lossless": True}),
        ("gif", {"mode": "P"}),
        ("bmp", {}),
    ],
    ids=str,
)
def test_cut_at_any_byte_it_is_refused_or_decodes_to_the_same_pixels(
    decode: Callable[[bytes], bytes], kind: str, how: dict[str, Any]
) -> None:
    """Never an image with a grey lower part."""
    data = photo(kind, **how)
    whole = {decode(data), for_training(data)}  # where the reduced decoder refuses, the other one
    refused = 0
    for length in range(len(data)):
        try:
            found = decode(data[:length])
        except BadSample:
            refused += 1
            continue
        assert found in whole, length
    assert refused > 0.9 * len(data)


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB", "1", "P", "LA", "RGBA"])
def test_images_of_every_mode_look_the_same(mode: str) -> None:
    kind = "jpeg" if mode == "CMYK" else "png"
    original = Image.open(BytesIO(photo("png"))).convert(mode)
    expected = np.asarray(original.convert("RGB"), dtype=int)
    found = np.asarray(decode_image(saved(original, kind), "x"), dtype=int)
    assert abs(found - expected).max() <= (30 if kind == "jpeg" else 0)
    assert found.std() > 10


def test_of_16_bits_the_upper_8_are_kept() -> None:
    levels = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16) + 7
    image = decode_image(saved(Image.fromarray(levels)), "x")
    assert (np.asarray(image) == (levels >> 8)[..., None]).all()


def test_what_is_transparent_shows_white() -> None:
    pixels = np.zeros((2, 2, 4), np.uint8)
    pixels[..., 3] = [[0, 255], [128, 0]]
    image = np.asarray(decode_image(saved(Image.fromarray(pixels)), "x"))
    assert image[..., 0].tolist() == [[255, 0], [127, 255]]
    black = Image.new("P", (2, 2), 0)
    black.putpalette([0, 0, 0, 255, 0, 0])
    assert np.asarray(decode_image(saved(black, transparency=0), "x")).min() == 255
    assert np.asarray(decode_image(saved(black, transparency=1), "x")).max() == 0
    for mode, colour in (("RGB", (0, 0, 0)), ("L", 0)):
        keyed = saved(Image.new(mode, (2, 2)), transparency=colour)
        assert np.asarray(decode_image(keyed, "x")).min() == 255


@pytest.mark.parametrize("kind", ["gif", "webp", "png"])
def test_of_an_animation_the_first_image_is_taken(kind: str) -> None:
    red, *others = (Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue"))
    data = saved(red, kind, save_all=True, append_images=others)
    assert Image.open(BytesIO(data)).n_frames == 3
    image = decode_image(data, "x")
    assert image.size == (8, 8)
    assert abs(np.asarray(image, dtype=int) - (255, 0, 0)).max() <= 8


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_upright_once(kind: str, orientation: int) -> None:
    tags = Image.Exif()
    tags[0x0112] = orientation
    data = photo(kind, exif=tags)
    expected = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    image = decode_image(data, "x")
    assert image.size == expected.size == ((20, 16) if orientation < 5 else (16, 20))
    assert image.tobytes() == expected.convert("RGB").tobytes()
    assert ImageOps.exif_transpose(image).tobytes() == image.tobytes()


@pytest.mark.parametrize("turn", [1, 6])
def test_a_jpeg_is_decoded_at_the_least_size_that_is_asked(turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    rough = Image.fromarray(np.random.default_rng(0).integers(0, 255, (6, 8, 3), dtype=np.uint8))
    data = saved(rough.resize((800, 600), Image.Resampling.BICUBIC), "jpeg", exif=exif)
    whole = decode_image(data, "x")
    for least, size in ((700, (800, 600)), (300, (400, 300)), (150, (200, 150)), (9, (100, 75))):
        image = decode_image(data, "x", least)
        assert image.size == (size if turn == 1 else size[::-1])
        small = np.asarray(whole.resize(image.size, Image.Resampling.BOX), dtype=np.int64)
        assert abs(np.asarray(image) - small).mean() < 2
    png = saved(whole)
    assert decode_image(png, "x", 9).size == whole.size, "only a JPEG is decoded small"
    with pytest.raises(BadSample, match="unreadable"):
        decode_image(data[: len(data) // 2], "x", 150)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize(
    "garbage", [b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*" * 9]
)
def test_garbage_beside_the_pixels_does_no_harm(garbage: bytes) -> None:
    whole = decode_image(photo("jpeg"), "x").tobytes()
    assert decode_image(photo("jpeg", exif=garbage), "x").tobytes() == whole
    assert decode_image(photo("jpeg", icc_profile=garbage * 9), "x").tobytes() == whole
    whole = decode_image(photo("webp"), "x").tobytes()
    assert decode_image(photo("webp", exif=garbage, icc_profile=garbage), "x").tobytes() == whole


@pytest.mark.parametrize("kind", ["tiff", "ppm", "ico", "eps", "pdf", "tga", "jpeg2000"])
def test_formats_that_no_corpus_holds_are_refused(kind: str) -> None:
    assert kind_of(saved(Image.new("RGB", (32, 32)), kind)) == "unreadable image"


@pytest.mark.parametrize("name", bombs())
@pytest.mark.parametrize("decode", [fully, for_training])
@pytest.mark.parametrize("warning", ["ignore", "error"])
def test_a_bomb_is_refused_by_its_header(
    name: str, decode: Callable[[bytes], bytes], warning: Literal["ignore", "error"]
) -> None:
    with warnings.catch_warnings():
        # Pillow's own warning is the same answer where warnings are errors.
        warnings.simplefilter(warning)
        assert kind_of(bombs()[name], decode) == "image too large"


_MEASURE = """
import resource, sys, warnings
from pathlib import Path
from vlp.data.image.decode import decode_image
from vlp.data.shards.sample_files import BadSample
warnings.simplefilter("ignore")
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
decode_image(Path(sys.argv[1]).read_bytes(), "x")
before = peak()
for path in sys.argv[2:]:
    try:
        decode_image(Path(path).read_bytes(), "x")
    except BadSample:
        pass
print(peak() - before)
"""


def test_no_memory_is_spent_on_bombs(tmp_path: Path) -> None:
    """Decoded, the smallest of them would take 256 MiB, the largest 40 GB."""
    flood = packed_zeros(100_000_000)
    files = bombs() | {
        "whole": png_of(9000, 9000, zeros=9000 * 27001),
        "colour profile": png_of(9, 9, chunk(b"iCCP", b"x\0\0" + flood)),
        "text": png_of(9, 9, *[chunk(b"zTXt", b"x\0\0" + flood)] * 3),
        "more pixels than announced": png_of(9, 9, zeros=100_000_000),
    }
    (tmp_path / "good").write_bytes(photo("webp"))
    for number, data in enumerate(files.values()):
        (tmp_path / str(number)).write_bytes(data)
    names = ["good", *map(str, range(len(files)))]
    ran = subprocess.run(
        [sys.executable, "-c", _MEASURE, *(str(tmp_path / name) for name in names)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(ran.stdout) < 64  # MiB
