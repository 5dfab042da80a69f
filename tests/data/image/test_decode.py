import struct
import warnings
import zlib
from io import BytesIO

import numpy as np
import pytest
import torch
from broken_images import bombs, chunk, photo, png_of
from hypothesis import given, settings
from hypothesis import strategies as st
from made_shards import encoded
from made_shards import photo as blobs
from PIL import Image, ImageOps

from vlp.config import ConfigError
from vlp.data.image.decode import EncodedImage, decode_image, pil_to_tensor
from vlp.data.limits import Limits, limits, set_limits
from vlp.data.shards.sample_files import BadSample

pytestmark = pytest.mark.filterwarnings("ignore:Corrupt EXIF", "ignore:Image size")


def fully(data):
    return decode_image(data, "x").tobytes()


def for_training(data):
    return EncodedImage(data, "x").decode().numpy().tobytes()


def reduced(data):
    return EncodedImage(data, "x").decode((1, 1)).numpy().tobytes()


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
def test_truncated_images_are_refused_or_decode_to_the_same_pixels(decode, kind, how):
    data = photo(kind, **how)
    whole = {decode(data), for_training(data)}  # where the reduced decoder refuses, the other one
    refused = 0
    for length in range(len(data)):
        try:
            pixels = decode(data[:length])
        except BadSample:
            refused += 1
            continue
        assert pixels in whole, length
    assert refused > 0.9 * len(data)


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB", "1", "P", "LA", "RGBA"])
def test_images_of_every_mode_look_the_same(mode):
    kind = "jpeg" if mode == "CMYK" else "png"
    original = Image.open(BytesIO(photo("png"))).convert(mode)
    expected = np.asarray(original.convert("RGB"), dtype=int)
    decoded = np.asarray(decode_image(encoded(original, kind), "x"), dtype=int)
    assert abs(decoded - expected).max() <= (30 if kind == "jpeg" else 0)
    assert decoded.std() > 10


def test_transparency_becomes_white():
    pixels = np.zeros((2, 2, 4), np.uint8)
    pixels[..., 3] = [[0, 255], [128, 0]]
    image = np.asarray(decode_image(encoded(Image.fromarray(pixels), "png"), "x"))
    assert image[..., 0].tolist() == [[255, 0], [127, 255]]
    black = Image.new("P", (2, 2), 0)
    black.putpalette([0, 0, 0, 255, 0, 0])
    assert np.asarray(decode_image(encoded(black, "png", transparency=0), "x")).min() == 255
    assert np.asarray(decode_image(encoded(black, "png", transparency=1), "x")).max() == 0
    for mode, colour in (("RGB", (0, 0, 0)), ("L", 0)):
        keyed = encoded(Image.new(mode, (2, 2)), "png", transparency=colour)
        assert np.asarray(decode_image(keyed, "x")).min() == 255


@pytest.mark.parametrize(
    ("depth", "colour", "level"),
    [(1, 0, 1), (2, 0, 1), (4, 0, 5), (8, 0, 5), (16, 0, 5), (16, 2, 5)],
)
def test_a_transparent_level_shows_white_at_every_depth(depth, colour, level):
    parts = 3 if colour else 1
    rows = [
        b"\0"
        + sum((level + row) % 2**depth << n * depth for n in range(8 * parts)).to_bytes(
            depth * parts
        )
        for row in range(2)
    ]
    header = struct.pack(">IIBBBBB", 8, 2, depth, colour, 0, 0, 0)
    parts_of = (
        chunk(b"IHDR", header),
        chunk(b"tRNS", struct.pack(">H", level) * parts),
        chunk(b"IDAT", zlib.compress(b"".join(rows))),
        chunk(b"IEND", b""),
    )
    image = np.asarray(decode_image(b"\x89PNG\r\n\x1a\n" + b"".join(parts_of), "x"))
    assert image[0].min() == 255
    # Of 16-bit colours Pillow keeps the upper 8 bits alone, so the next level is the same.
    assert image[1].min() == (255 if colour else image[1].max()) != (0 if colour else 255)


@pytest.mark.parametrize("where", ["before", "behind"])
def test_text_chunks_of_a_png_are_ignored(where):
    note = b"workflow\0\0" + zlib.compress(b"a" * 3_000_000)
    notes = [chunk(b"zTXt", note), chunk(b"iCCP", note), chunk(b"tEXt", b"xmp\0" + b"x" * 2**21)]
    exif = Image.Exif()
    exif[0x0112] = 6
    data = photo(exif=exif)
    place = data.index(b"IDAT" if where == "before" else b"IEND") - 4
    noted = data[:place] + b"".join(notes) + data[place:]
    image = decode_image(noted, "x")
    assert image.size == EncodedImage(noted, "x").size == (16, 20)
    assert image.tobytes() == decode_image(data, "x").tobytes()


@pytest.mark.parametrize("kind", ["gif", "webp", "png"])
def test_animations_decode_to_their_first_frame(kind):
    red, *others = (Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue"))
    data = encoded(red, kind, save_all=True, append_images=others)
    assert Image.open(BytesIO(data)).n_frames == 3
    image = decode_image(data, "x")
    assert image.size == (8, 8)
    assert abs(np.asarray(image, dtype=int) - (255, 0, 0)).max() <= 8


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_once(kind, orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    data = photo(kind, exif=tags)
    expected = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    image = decode_image(data, "x")
    assert image.size == expected.size == ((20, 16) if orientation < 5 else (16, 20))
    assert image.tobytes() == expected.convert("RGB").tobytes()
    assert ImageOps.exif_transpose(image).tobytes() == image.tobytes()
    opened = EncodedImage(data, "x")
    assert opened.size == opened.image().size == image.size
    assert torch.equal(opened.decode(), pil_to_tensor(image))
    rows, columns = opened.decode((4, 4)).shape[1:]
    assert columns / rows == pytest.approx(image.width / image.height, rel=0.1)


@pytest.mark.parametrize("turn", [1, 6])
def test_jpegs_are_decoded_at_the_smallest_sufficient_size(turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    rough = Image.fromarray(np.random.default_rng(0).integers(0, 255, (6, 8, 3), dtype=np.uint8))
    data = encoded(rough.resize((800, 600), Image.Resampling.BICUBIC), exif=exif)
    whole = decode_image(data, "x")
    for least, size in ((700, (800, 600)), (300, (400, 300)), (150, (200, 150)), (9, (100, 75))):
        image = decode_image(data, "x", least)
        assert image.size == (size if turn == 1 else size[::-1])
        small = np.asarray(whole.resize(image.size, Image.Resampling.BOX), dtype=np.int64)
        assert abs(np.asarray(image) - small).mean() < 2
    png = encoded(whole, "png")
    assert decode_image(png, "x", 9).size == whole.size, "only a JPEG is decoded small"
    with pytest.raises(BadSample, match="unreadable"):
        decode_image(data[: len(data) // 2], "x", 150)


@pytest.mark.parametrize(
    "garbage", [b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*" * 9]
)
def test_damaged_metadata_is_ignored(garbage):
    whole = decode_image(photo("jpeg"), "x").tobytes()
    assert decode_image(photo("jpeg", exif=garbage), "x").tobytes() == whole
    assert decode_image(photo("jpeg", icc_profile=garbage * 9), "x").tobytes() == whole
    whole = decode_image(photo("webp"), "x").tobytes()
    assert decode_image(photo("webp", exif=garbage, icc_profile=garbage), "x").tobytes() == whole


@pytest.mark.parametrize("name", bombs())
@pytest.mark.parametrize("decode", [fully, for_training])
@pytest.mark.parametrize("warning", ["ignore", "error"])
def test_decompression_bombs_are_refused_by_their_header(name, decode, warning):
    with warnings.catch_warnings():
        # Pillow's own warning is the same answer where warnings are errors.
        warnings.simplefilter(warning)
        with pytest.raises(BadSample, match="image too large"):
            decode(bombs()[name])


def segment(marker, content):
    return bytes((0xFF, marker)) + struct.pack(">H", len(content) + 2) + content


def after_start(data, more):
    return data[:20] + more + data[20:]


def exif(fields, size):
    """EXIF of so many fields, each of which is said to hold the same `size` bytes."""
    start = 8 + 2 + 12 * fields + 4
    entries = b"".join(struct.pack("<HHII", 7, 7, size, start) for _ in range(fields))
    return b"II*\0\x08\0\0\0" + struct.pack("<H", fields) + entries + bytes(4 + size)


def scans(count, size=(64, 64)):
    """A progressive JPEG whose last scan comes again and again."""
    data = photo("jpeg", size, progressive=True)
    start = data.rindex(b"\xff\xda")
    return data[:start] + data[start:-2] * count + b"\xff\xd9"


def sequential(count):
    """A JPEG that is not progressive and comes one colour a scan, each of them `count` times."""
    data = photo("jpeg", (64, 64), mode="L")
    start = data.rindex(b"\xff\xda")
    frame = data.index(b"\xff\xc0")
    # Two colours are announced, and one comes in each scan.
    two = data[frame + 4 : frame + 9] + b"\2" + data[frame + 10 : frame + 13] + b"\2\x11\0"
    behind = frame + 2 + int.from_bytes(data[frame + 2 : frame + 4])
    head = data[:frame] + segment(0xC0, two) + data[behind:start]
    return head + data[start:-2] * count + b"\xff\xd9"


def gif_of(extensions):
    data = photo("gif", mode="P")
    place = 13 + 3 * 2 ** (data[10] % 8 + 1)
    return data[:place] + extensions + data[place:]


def run_length_bmp(size, rows):
    """A BMP of empty rows of run lengths: Pillow fills each byte by byte."""
    content = b"\1\0\0\0" * rows
    info = struct.pack("<IiiHHIIiiII", 40, size, size, 1, 8, 1, len(content), 0, 0, 256, 0)
    start = 14 + len(info) + 1024
    head = b"BM" + struct.pack("<IHHI", start + len(content), 0, 0, start)
    return head + info + bytes(1024) + content


JPEG = photo("jpeg")
RAW_EXIF = b"\n exif\n 1\n" + (b"Exif\0\0" + exif(8000, 100_000)).hex().encode()
HOSTILE = {
    "scans": scans(2000, (1200, 1200)),
    "scans of one colour each": sequential(200_000),
    "comments": after_start(JPEG, segment(0xFE, b"") * 300_000),
    "rubbish": after_start(JPEG, bytes(3_000_000)),
    "bytes that fill": after_start(JPEG, b"\xff" * 3_000_000),
    "EXIF in parts": after_start(JPEG, segment(0xE1, b"Exif\0\0" + exif(5000, 5000)) * 100),
    "chunks": png_of(9, 9, *[chunk(b"teXt", b"")] * 300_000),
    "a line": photo("png", (1, 4_000_000)),
    "a line across": photo("png", (300_000, 3)),
    "blocks": gif_of(b"!\xfe" + b"\1x" * 1_000_000 + b"\0"),
    "rubbish in a GIF": gif_of(bytes(3_000_000)),
}


@pytest.mark.parametrize("decode", [decode_image, EncodedImage], ids=["decoded", "opened"])
@pytest.mark.parametrize("name", HOSTILE)
def test_too_large_images_are_refused_at_once(within, name, decode):
    with (
        within(seconds=3, peak=20_000_000 + 4 * len(HOSTILE[name])),
        pytest.raises(BadSample, match="shard, key") as bad,
    ):
        decode(HOSTILE[name], "shard, key")
    # Pillow knows no JPEG of two colours.
    unreadable = name == "scans of one colour each"
    assert bad.value.kind == ("unreadable image" if unreadable else "image too large")
    assert "\n" not in str(bad.value)


@pytest.mark.parametrize(
    "data",
    [
        png_of(9, 9, chunk(b"eXIf", exif(60_000, 600_000))),
        png_of(9, 9, chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(RAW_EXIF))),
        photo("webp", exif=b"Exif\0\0" + exif(60_000, 600_000)),
    ],
    ids=["png", "png text", "webp"],
)
def test_exif_of_many_large_fields_is_cut(within, data):
    with within(seconds=1, peak=100_000_000):
        assert decode_image(data, "x").mode == "RGB"


@pytest.mark.parametrize(
    "data",
    [
        scans(60),
        after_start(JPEG, segment(0xFE, b"x" * 9) * 200),
        after_start(JPEG, b"\0\0\xff\xff\xff" + segment(0xFE, b"x" * 60_000)[1:]),
        after_start(JPEG, segment(0xE1, b"Exif\0\0" + exif(20, 60_000))),
        after_start(JPEG, segment(0xE2, b"ICC_PROFILE\0" + bytes(65_000)) * 40),
        photo("png", (4000, 20)),
        png_of(9, 9, *[chunk(b"teXt", b"")] * 500),
        gif_of(b"!\xfe" + b"\1x" * 300 + b"\0"),
        run_length_bmp(100, 100),
    ],
    ids=lambda data: f"{data[:4]!r}{len(data)}",
)
def test_unusual_images_decode(data):
    expected = Image.open(BytesIO(data))
    assert decode_image(data, "x").size == expected.size
    assert np.array_equal(decode_image(data, "x"), expected.convert("RGB"))
    assert EncodedImage(data, "x").decode().shape[1:] == expected.size[::-1]


def test_limits_pixels_is_a_configuration_key(monkeypatch):
    data = photo("jpeg", progressive=True)
    monkeypatch.setenv("VLP_LIMITS", "{pixels: 320}")
    assert decode_image(data, "x").size == EncodedImage(data, "x").size == (20, 16)
    monkeypatch.setenv("VLP_LIMITS", "{pixels: 319}")
    for decode in (decode_image, EncodedImage):
        with pytest.raises(BadSample, match=r"too large: x \(20 x 16 .* limits\.pixels 319\)"):
            decode(data, "x")


@pytest.mark.parametrize(
    ("name", "most"),
    [("MAX_IMAGE_BYTES", 300), ("MAX_SIDE", 19), ("MAX_ASPECT", 1.2), ("MAX_SCAN_PIXELS", 3199)],
)
def test_other_limits(monkeypatch, name, most):
    data = photo("jpeg", progressive=True)
    decode_image(data, "x")
    monkeypatch.setattr(f"vlp.data.image.decode.{name}", most)
    for decode in (decode_image, EncodedImage):
        with pytest.raises(BadSample, match="image too large: x"):
            decode(data, "x")


def test_limits_come_from_the_environment(monkeypatch):
    monkeypatch.delenv("VLP_LIMITS", raising=False)
    assert limits() == Limits()
    monkeypatch.setenv("VLP_LIMITS", "")
    set_limits(Limits(pixels=7))
    assert limits() == Limits(pixels=7)
    for text, hint in (("{pixel: 7}", "did you mean 'pixels'"), ("7", "a mapping"), ("{", "YAML")):
        monkeypatch.setenv("VLP_LIMITS", text)
        with pytest.raises(ConfigError, match=f"VLP_LIMITS: .*{hint}"):
            limits()


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_levels_of_a_jpeg_are_exactly_pillows(subsampling, progressive, mode):
    image = blobs(0, (91, 67)).convert(mode)
    data = encoded(image, subsampling=subsampling, progressive=progressive, quality=80)
    decoded = EncodedImage(data, "x").decode()
    assert decoded.dtype == torch.uint8
    assert torch.equal(decoded, pil_to_tensor(decode_image(data, "x")))


@pytest.mark.parametrize("kind", ["png", "webp", "gif", "bmp"])
def test_other_formats_are_decoded_by_pillow_at_full_size(kind):
    data = encoded(blobs(0, (90, 70)), kind)
    for least in ((0, 0), (5, 5)):
        decoded = EncodedImage(data, "x").decode(least)
        assert torch.equal(decoded, pil_to_tensor(decode_image(data, "x")))


@settings(max_examples=60, deadline=None)
@given(st.integers(8, 200), st.integers(8, 200), st.floats(0.02, 1.2), st.floats(0.02, 1.2))
def test_reduced_images_cover_min_size(width, height, across, down):
    least = max(1, int(across * width)), max(1, int(down * height))
    jpeg = EncodedImage(encoded(blobs(0, (width, height))), "x")
    rows, columns = jpeg.decode(least).shape[1:]
    assert columns >= min(least[0], width)
    assert rows >= min(least[1], height)
    assert (columns, rows) in {
        (-(-width * number // 8), -(-height * number // 8)) for number in (8, 4, 3, 2, 1)
    }
    half = -(-width // 2), -(-height // 2)
    if least[0] <= half[0] and least[1] <= half[1]:
        assert (columns, rows) <= half  # whatever half can serve is not decoded at full size


@pytest.mark.parametrize("seed", range(40))
def test_damaged_images_are_refused_where_pillow_refuses_them(seed):
    rng = np.random.default_rng(seed)
    data = bytearray(encoded(blobs(0, (90, 70)), quality=85, progressive=bool(seed % 2)))
    for place in rng.integers(0, len(data), 3):
        data[place] = rng.integers(256)
    if seed % 4 == 0:
        del data[rng.integers(len(data)) :]

    def outcome(decode):
        try:
            return decode().numpy().tobytes()
        except BadSample as bad:
            return bad.kind

    expected = outcome(lambda: pil_to_tensor(decode_image(bytes(data), "x")))
    assert outcome(lambda: EncodedImage(bytes(data), "x").decode()) == expected
