from io import BytesIO

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_shards import encoded as jpeg
from PIL import Image, ImageEnhance, ImageOps

from vlp.config import ConfigError
from vlp.data.config import AugmentConfig
from vlp.data.image.decode import EncodedImage, decode_image, upright_rgb
from vlp.data.image.transforms import (
    OPERATIONS,
    Preprocessing,
    TrainTransform,
    _min_size,
    apply_view,
    random_crop,
)

PLAIN = AugmentConfig(randaugment=False, crop_scale=(1.0, 1.0), hflip=False)


def photo(width=40, height=30, seed=0):
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def test_preprocessing_is_a_bicubic_squash_and_a_normalisation():
    prepare = Preprocessing(16, mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 0.2))
    image = photo()
    squashed = np.asarray(image.resize((16, 16), Image.Resampling.BICUBIC)) / 255
    expected = (squashed - np.array([0.5, 0.4, 0.3])) / np.array([0.5, 0.25, 0.2])
    tensor = prepare(image)
    assert tensor.dtype == torch.float32
    assert tensor.is_contiguous()
    assert torch.allclose(tensor.double(), torch.from_numpy(expected).permute(2, 0, 1), atol=1e-6)


def turned():
    tags = Image.Exif()
    tags[0x0112] = 6
    return tags


SHADES = np.linspace(0, 65535, 1200).astype(np.uint16).reshape(30, 40)


@pytest.mark.parametrize(
    ("image", "kind", "how"),
    [
        (photo().convert("LA").convert("RGBA"), "png", {}),
        (Image.new("RGBA", (40, 30), (0, 0, 0, 0)), "png", {}),
        (photo().quantize(8), "png", {"transparency": 3}),
        (photo(), "png", {"transparency": photo().getpixel((0, 0))}),
        (Image.fromarray(SHADES), "png", {}),
        (photo(), "jpeg", {"exif": turned()}),
        (photo(), "png", {"exif": turned()}),
        (photo(), "webp", {"exif": turned()}),
    ],
)
def test_a_file_that_pillow_opened_is_what_training_sees(image, kind, how):
    stream = BytesIO()
    image.save(stream, kind, **how)
    prepare, train = Preprocessing(16), TrainTransform(AugmentConfig(), Preprocessing(16))
    decoded = decode_image(stream.getvalue(), "x")
    with Image.open(stream) as opened:
        assert torch.equal(prepare(opened), prepare(decoded))
        augmented = train(opened, np.random.default_rng(0), "x")
    assert torch.equal(augmented, train(decoded, np.random.default_rng(0), "x"))
    assert upright_rgb(decoded) is decoded  # neither turned twice nor copied


def test_preprocessing_is_saved_and_loaded(tmp_path):
    Preprocessing(24, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)).save(tmp_path / "model")
    again = Preprocessing.load(tmp_path / "model")
    assert (again.image_size, again.mean, again.std) == (24, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    with pytest.raises(ConfigError, match=r"processor_config\.json"):
        Preprocessing.load(tmp_path)
    (tmp_path / "processor_config.json").write_text('{"image_size": 3}')
    with pytest.raises(ConfigError, match="not a preprocessing file"):
        Preprocessing.load(tmp_path)


def test_augmentation_is_deterministic_by_generator():
    train = TrainTransform(AugmentConfig(), Preprocessing(16))
    image = photo()
    first = [train(image, np.random.default_rng(seed), "x") for seed in range(20)]
    np.random.seed(5)
    torch.manual_seed(7)
    second = [train(image, np.random.default_rng(seed), "x") for seed in range(20)]
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert len({tensor.numpy().tobytes() for tensor in first}) == 20


@pytest.mark.parametrize(
    "caption", ["left of it", "A dog on the Right", "leftmost", "the right-hand door", "RIGHT"]
)
def test_no_hflip_if_the_caption_names_a_side(caption):
    prepare = Preprocessing(16)
    train = TrainTransform(PLAIN.model_copy(update={"hflip": True}), prepare)
    image = photo()
    plain, flipped = prepare(image), prepare(image).flip(2)
    for seed in range(10):
        assert torch.equal(train(image, np.random.default_rng(seed), caption), plain)
    free = [train(image, np.random.default_rng(seed), "a bright cleft") for seed in range(40)]
    flips = sum(torch.allclose(tensor, flipped, atol=0.02) for tensor in free)
    assert 10 < flips < 30
    assert flips + sum(torch.equal(tensor, plain) for tensor in free) == 40


def test_crops_have_the_stated_area_and_stay_inside():
    boxes = [random_crop(100, 80, (0.3, 0.6), np.random.default_rng(seed)) for seed in range(100)]
    left, upper, right, lower = np.array(boxes).T
    width, height = right - left, lower - upper
    for values, least, most in ((width * height / 8000, 0.3, 0.6), (width / height, 3 / 4, 4 / 3)):
        assert values.min() == pytest.approx(least, rel=0.1)
        assert values.max() == pytest.approx(most, rel=0.1)
    assert min(left.min(), upper.min(), 100 - right.max(), 80 - lower.max()) >= 0


def test_crops_are_resized_like_pillow():
    size = (120, 90)
    noise = np.random.default_rng(0).integers(60, 200, (90, 120, 3), dtype=np.uint8)
    config = AugmentConfig(randaugment=False, hflip=False, crop_scale=(0.3, 0.9))
    train = TrainTransform(config, Preprocessing(48))
    for image in (photo(*size), Image.fromarray(noise)):
        for seed in range(10):
            box = random_crop(*size, config.crop_scale, np.random.default_rng(seed))
            pixels = train.prepare(image, np.random.default_rng(seed), "x")()
            result = pixels.permute(1, 2, 0).numpy()
            expected = np.array(image.crop(box).resize((48, 48), Image.Resampling.BICUBIC))
            difference = np.abs(result.astype(int) - expected)
            assert difference.mean() < 0.35
            assert (difference > 1).mean() < 0.01


@pytest.mark.parametrize("config", [PLAIN, AugmentConfig(quick_decode=False), AugmentConfig()])
def test_encoded_and_decoded_images_are_augmented_equally(config):
    # Too small to be decoded at half size.
    encoded = EncodedImage(jpeg(photo(60, 44), quality=95), "x")
    train = TrainTransform(config, Preprocessing(32))
    for seed in range(10):
        augmented = train(encoded, np.random.default_rng(seed), "x")
        assert torch.equal(augmented, train(encoded.image(), np.random.default_rng(seed), "x"))


def test_a_reduced_image_shows_the_same_crop():
    image = photo(640, 480)
    image.paste((255, 0, 0), (300, 200, 420, 330))  # an edge would show a crop that is off
    encoded = EncodedImage(jpeg(image, quality=95), "x")
    for scale in ((0.2, 0.5), (0.5, 1.0), (0.99, 1.0)):
        config = AugmentConfig(randaugment=False, hflip=False, crop_scale=scale, quick_decode=True)
        full = config.model_copy(update={"quick_decode": False})
        for seed in range(8):
            small, large = (
                TrainTransform(how, Preprocessing(64)).prepare(
                    encoded, np.random.default_rng(seed), "x"
                )()
                for how in (config, full)
            )
            assert small.shape == large.shape == (3, 64, 64)
            assert not torch.equal(small, large)
            assert (small.float() - large.float()).abs().mean() < 3


@given(st.integers(8, 900), st.integers(8, 900), st.integers(1, 300), st.integers(0, 99))
def test_a_crop_keeps_its_resolution(width, height, side, seed):
    box = random_crop(width, height, (0.1, 1.0), np.random.default_rng(seed))
    least = _min_size((width, height), box, side)
    for numerator in (4, 3, 2, 1):
        columns, rows = -(-width * numerator // 8), -(-height * numerator // 8)
        if columns >= least[0] and rows >= least[1]:
            assert (box[2] - box[0]) * columns >= side * width
            assert (box[3] - box[1]) * rows >= side * height


def patches(image, side):
    cut = image.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 0, 3, 4)
    return {tuple(patch) for patch in cut.reshape(-1, image.shape[0] * side * side).tolist()}


def test_shuffled_images_are_patches_of_the_moved_image():
    pixels = torch.rand(3, 3, 8, 12)
    mixed = apply_view(pixels, "shuffled", 4, 1)
    for image, shuffled in zip(pixels, mixed):
        moves = [torch.roll(image, (y, x), (1, 2)) for y in range(4) for x in range(4)]
        assert sum(patches(shuffled, 4) == patches(move, 4) for move in moves) == 1
    assert not torch.equal(mixed, pixels)
    assert torch.equal(apply_view(pixels, "shuffled", 4, 1), mixed)
    assert torch.equal(apply_view(pixels, "image", 4, 1), pixels)
    assert not apply_view(pixels, "blank", 4, 0).any()


def test_shuffled_patches_do_not_reveal_positions():
    """A line in one column of an image, found in every column of a patch equally often."""
    pixels = torch.zeros(400, 1, 8, 8)
    pixels[..., 5] = 1
    mixed = apply_view(pixels, "shuffled", 4, 0)
    columns = mixed.sum((0, 1, 2)).unflatten(0, (2, 4)).sum(0)
    assert columns.sum() == 400 * 8
    assert ((columns - 800).abs() < 160).all()


FILL = (128, 128, 128)


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
    "_identity": lambda image, strength, sign: image,
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


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("strength", [0.3, 0.7])
def test_operations_are_pillows(operation, sign, strength):
    image, name = photo(48, 36, seed=3), operation.__name__
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().contiguous()
    before = pixels.clone()
    actual = operation(pixels, strength, sign).permute(1, 2, 0).numpy()
    assert torch.equal(pixels, before)
    expected = np.array(REFERENCE[name](image, strength, sign)).astype(float)
    difference = np.abs(actual - expected)
    # Apart by the rounding of the reference, which HSV multiplies, and along the edge of what was
    # moved, where Pillow repeats the last pixel for half a pixel before the fill begins.
    through_hsv, moved = ("_equalize", "_brightness"), ("_shear", "_trans", "_rotat")
    assert np.median(difference) < 1
    alike = difference < (8 if name in through_hsv else 1.5)
    assert alike.mean() > (0.93 if name.startswith(moved) else 0.999)


def test_uncovered_places_are_mid_grey():
    by_name = {operation.__name__: operation for operation in OPERATIONS}
    bright = torch.full((3, 20, 20), 250.0)
    shifted = by_name["_translate_x"](bright, 1.0, 1)
    shift = 20 * 10 / 256
    assert torch.equal(shifted[:, :, :19], bright[:, :, :19])
    share = 1 - (shift % 1)
    assert torch.allclose(shifted[:, :, 19], torch.tensor(128 + share * 122))
    corner = by_name["_rotate"](bright, 1.0, 1)[:, 0, 0]
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
