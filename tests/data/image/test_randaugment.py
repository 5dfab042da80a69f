import colorsys

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from vlp.data.image.transforms import OPERATIONS, randaugment

BY_NAME = {operation.__name__: operation for operation in OPERATIONS}
FILL = (128, 128, 128)


def photo(width=40, height=30, seed=0):
    """Smooth enough that a shift of half a level of a place changes little."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def levels(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().contiguous()


def as_array(tensor):
    return tensor.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "colour", [(200, 40, 40), (40, 160, 60), (60, 60, 220), (210, 190, 40), (220, 120, 40)]
)
def test_no_operation_changes_hue(operation, sign, colour):
    # On dark grey with a black corner, so that stretching the channels one by one, or past their
    # end, would show; shifted or turned, the middle still lies in the coloured square.
    image = Image.new("RGB", (32, 32), (60, 60, 60))
    image.paste(colour, (6, 6, 26, 26))
    image.paste((0, 0, 0), (0, 0, 4, 4))
    given = levels(image)
    before = given.clone()
    result = operation(given, 0.7, sign)
    assert torch.equal(given, before)
    assert result.shape == (3, 32, 32)
    assert result.dtype == torch.float32
    assert result.min() >= 0
    assert result.max() <= 255
    red, green, blue = as_array(result)[16, 16] / 255
    hue, saturation, _ = colorsys.rgb_to_hsv(red, green, blue)
    expected = colorsys.rgb_to_hsv(*(value / 255 for value in colour))
    assert min(abs(hue - expected[0]), 1 - abs(hue - expected[0])) < 0.015
    assert saturation > 0.9 * expected[1]


def test_every_operation_but_identity_does_something():
    # Muted, so that stretching contrast has room.
    muted = levels(Image.eval(photo(32, 32), lambda value: 60 + value // 3))
    same = [op.__name__ for op in OPERATIONS if torch.equal(op(muted, 0.7, 1), muted)]
    assert same == ["_identity"]


def hsv_value(image, change):
    hue, saturation, value = image.convert("HSV").split()
    return Image.merge("HSV", (hue, saturation, change(value))).convert("RGB")


def pillow_autocontrast(image, strength, sign):
    low, high = int(np.array(image).min()), int(np.array(image).max())
    return image.point(
        [255 * min(max(n - low, 0), high - low) / (high - low) for n in range(256)] * 3
    )


def pillow_brightness(image, strength, sign):
    table = [min(round((1 + sign * 0.9 * strength) * level), 255) for level in range(256)]
    return hsv_value(image, lambda value: value.point(table))


def pillow_affine(matrix):
    def move(image, strength, sign):
        numbers = matrix(sign * strength, *image.size)
        bilinear = Image.Resampling.BILINEAR
        return image.transform(
            image.size, Image.Transform.AFFINE, numbers, bilinear, fillcolor=FILL
        )

    return move


# The same operations in Pillow, in 8 bits.
REFERENCE = {
    "_autocontrast": pillow_autocontrast,
    "_equalize": lambda image, strength, sign: hsv_value(image, ImageOps.equalize),
    "_brightness": pillow_brightness,
    "_sharpness": lambda image, strength, sign: ImageEnhance.Sharpness(image).enhance(
        1 + sign * 0.9 * strength
    ),
    "_shear_x": pillow_affine(lambda by, width, height: (1, 0.3 * by, 0, 0, 1, 0)),
    "_shear_y": pillow_affine(lambda by, width, height: (1, 0, 0, 0.3 * by, 1, 0)),
    "_translate_x": pillow_affine(lambda by, width, height: (1, 0, by * width * 10 / 256, 0, 1, 0)),
    "_translate_y": pillow_affine(
        lambda by, width, height: (1, 0, 0, 0, 1, by * height * 10 / 256)
    ),
    "_rotate": lambda image, strength, sign: image.rotate(
        sign * 30 * strength, Image.Resampling.BILINEAR, fillcolor=FILL
    ),
}


@pytest.mark.parametrize("name", REFERENCE)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("strength", [0.3, 0.7])
def test_operations_are_pillows(name, sign, strength):
    image = photo(48, 36, seed=3)
    found = as_array(BY_NAME[name](levels(image), strength, sign))
    expected = np.array(REFERENCE[name](image, strength, sign)).astype(float)
    difference = np.abs(found - expected)
    # Apart by the rounding of the reference, which HSV multiplies, and along the edge of what was
    # moved, where Pillow repeats the last pixel for half a pixel before the fill begins.
    through_hsv, moved = ("_equalize", "_brightness"), ("_shear", "_trans", "_rotat")
    assert np.median(difference) < 1
    alike = difference < (8 if name in through_hsv else 1.5)
    assert alike.mean() > (0.93 if name.startswith(moved) else 0.999)


def test_uncovered_places_are_mid_grey():
    bright = torch.full((3, 20, 20), 250.0)
    shifted = BY_NAME["_translate_x"](bright, 1.0, 1)
    shift = 20 * 10 / 256
    assert torch.equal(shifted[:, :, :19], bright[:, :, :19])
    share = 1 - (shift % 1)
    assert torch.allclose(shifted[:, :, 19], torch.tensor(128 + share * 122))
    corner = BY_NAME["_rotate"](bright, 1.0, 1)[:, 0, 0]
    assert torch.equal(corner, torch.full((3,), 128.0))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("shape", [(3, 1, 1), (3, 2, 5), (3, 7, 1)])
@pytest.mark.parametrize("level", [0.0, 77.0, 255.0])
def test_tiny_and_plain_images(operation, shape, level):
    result = operation(torch.full(shape, level), 0.7, -1)
    assert result.shape == shape
    assert result.isfinite().all()
    assert result.min() >= 0
    assert result.max() <= 255


def test_choices_come_from_the_generator_and_the_input_stays():
    given = levels(photo())
    before = given.clone()
    first = [randaugment(given, np.random.default_rng(seed)) for seed in range(30)]
    torch.manual_seed(3)
    np.random.seed(4)
    second = [randaugment(given, np.random.default_rng(seed)) for seed in range(30)]
    assert torch.equal(given, before)
    assert all(torch.equal(one, other) for one, other in zip(first, second))
    assert len({result.numpy().tobytes() for result in first}) > 20
