from io import BytesIO

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image

from vlp.data.image.decode import JpegImage, decode_image, levels_of
from vlp.data.shards.sample_files import BadSample


def photo(width=90, height=70, seed=0):
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def encoded(image, kind="jpeg", **how):
    stream = BytesIO()
    image.save(stream, kind, **how)
    return stream.getvalue()


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_levels_of_a_jpeg_are_exactly_pillows(subsampling, progressive, mode):
    image = photo(91, 67).convert(mode)
    data = encoded(image, subsampling=subsampling, progressive=progressive, quality=80)
    found = JpegImage(data, "x").levels()
    assert found.dtype == torch.uint8
    assert torch.equal(found, levels_of(decode_image(data, "x")))


@pytest.mark.parametrize("kind", ["png", "webp", "gif", "bmp"])
def test_other_formats_are_decoded_by_pillow_at_full_size(kind):
    data = encoded(photo(), kind)
    for least in ((0, 0), (5, 5)):
        found = JpegImage(data, "x").levels(least)
        assert torch.equal(found, levels_of(decode_image(data, "x")))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_size_and_levels_are_of_the_upright_image(orientation):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = encoded(photo(64, 40), exif=exif)
    upright = decode_image(data, "x")
    own = JpegImage(data, "x")
    assert own.size == upright.size
    assert own.image().tobytes() == upright.tobytes()
    for least in ((0, 0), (4, 4)):
        width, height = upright.size
        rows, columns = own.levels(least).shape[1:]
        assert columns / rows == pytest.approx(width / height, rel=0.1)
    assert torch.equal(own.levels(), levels_of(upright))


@settings(max_examples=60, deadline=None)
@given(st.integers(8, 200), st.integers(8, 200), st.floats(0.02, 1.2), st.floats(0.02, 1.2))
def test_a_reduced_image_is_never_smaller_than_asked(width, height, across, down):
    least = max(1, int(across * width)), max(1, int(down * height))
    own = JpegImage(encoded(photo(width, height)), "x")
    rows, columns = own.levels(least).shape[1:]
    assert columns >= min(least[0], width)
    assert rows >= min(least[1], height)
    assert (columns, rows) in {
        (-(-width * number // 8), -(-height * number // 8)) for number in (8, 4, 3, 2, 1)
    }
    half = -(-width // 2), -(-height // 2)
    if least[0] <= half[0] and least[1] <= half[1]:
        assert (columns, rows) <= half  # whatever half can serve is not decoded at full size


def test_a_reduced_image_is_the_image():
    image = photo(400, 320)
    own = JpegImage(encoded(image, quality=95), "x")
    for size in ((200, 160), (100, 80), (50, 40)):
        found = own.levels(size).permute(1, 2, 0).numpy()
        expected = np.array(image.resize(size, Image.Resampling.BOX))
        assert found.shape == expected.shape
        assert np.abs(found.astype(int) - expected).mean() < 2


@pytest.mark.parametrize("seed", range(40))
def test_damaged_images_are_refused_where_pillow_refuses_them(seed):
    rng = np.random.default_rng(seed)
    data = bytearray(encoded(photo(), quality=85, progressive=bool(seed % 2)))
    for place in rng.integers(0, len(data), 3):
        data[place] = rng.integers(256)
    if seed % 4 == 0:
        del data[rng.integers(len(data)) :]

    def outcome(decode):
        try:
            return decode().numpy().tobytes()
        except BadSample as bad:
            return bad.kind

    expected = outcome(lambda: levels_of(decode_image(bytes(data), "x")))
    assert outcome(lambda: JpegImage(bytes(data), "x").levels()) == expected
