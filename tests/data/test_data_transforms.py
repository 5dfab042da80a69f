from __future__ import annotations

import colorsys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vlp.config import ConfigError
from vlp.data.config import AugmentConfig
from vlp.data.transforms import OPERATIONS, Preprocessing, TrainTransform

PLAIN = AugmentConfig(randaugment=False, crop_scale=(1.0, 1.0), mirror=False)


def picture(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def test_preprocessing_is_a_bicubic_squash_and_a_normalisation() -> None:
    prepare = Preprocessing(16, mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 0.2))
    image = picture()
    squashed = np.asarray(image.resize((16, 16), Image.Resampling.BICUBIC)) / 255
    expected = (squashed - np.array([0.5, 0.4, 0.3])) / np.array([0.5, 0.25, 0.2])
    tensor = prepare(image)
    assert tensor.dtype == torch.float32
    assert tensor.is_contiguous()
    assert torch.allclose(tensor.double(), torch.from_numpy(expected).permute(2, 0, 1), atol=1e-6)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_pictures_of_every_mode(mode: str) -> None:
    assert Preprocessing(8)(picture().convert(mode)).shape == (3, 8, 8)


def test_preprocessing_is_saved_and_loaded(tmp_path: Path) -> None:
    Preprocessing(24, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)).save(tmp_path / "model")
    again = Preprocessing.load(tmp_path / "model")
    assert (again.image_size, again.mean, again.std) == (24, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    with pytest.raises(ConfigError, match=r"preprocessing\.json"):
        Preprocessing.load(tmp_path)
    (tmp_path / "preprocessing.json").write_text('{"image_size": 3}')
    with pytest.raises(ConfigError, match="not a preprocessing file"):
        Preprocessing.load(tmp_path)


def test_without_augmentation_training_sees_what_evaluation_sees() -> None:
    prepare = Preprocessing(16)
    train = TrainTransform(PLAIN, prepare)
    image = picture()
    assert torch.equal(train(image, np.random.default_rng(0), "a dog"), prepare(image))


def test_all_choices_come_from_the_generator() -> None:
    train = TrainTransform(AugmentConfig(), Preprocessing(16))
    image = picture()
    first = [train(image, np.random.default_rng(seed), "x") for seed in range(20)]
    np.random.seed(5)
    torch.manual_seed(7)
    second = [train(image, np.random.default_rng(seed), "x") for seed in range(20)]
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert len({tensor.numpy().tobytes() for tensor in first}) == 20


@pytest.mark.parametrize(
    "caption", ["left of it", "A dog on the Right", "leftmost", "the right-hand door", "RIGHT"]
)
def test_no_mirror_when_the_caption_tells_sides(caption: str) -> None:
    prepare = Preprocessing(16)
    train = TrainTransform(PLAIN.model_copy(update={"mirror": True}), prepare)
    image = picture()
    plain, mirrored = prepare(image), prepare(image).flip(2)
    for seed in range(10):
        assert torch.equal(train(image, np.random.default_rng(seed), caption), plain)
    free = [train(image, np.random.default_rng(seed), "a bright cleft") for seed in range(40)]
    flips = sum(torch.allclose(tensor, mirrored, atol=0.02) for tensor in free)
    assert 10 < flips < 30
    assert flips + sum(torch.equal(tensor, plain) for tensor in free) == 40


def test_crops_have_the_stated_area_and_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = []
    resize = Image.Image.resize

    def spy(self: Image.Image, size: tuple[int, int], resample: int, box: tuple) -> Image.Image:
        boxes.append(box)
        return resize(self, size, resample, box=box)

    image = picture(100, 80)
    monkeypatch.setattr(Image.Image, "resize", spy)
    config = AugmentConfig(randaugment=False, mirror=False, crop_scale=(0.3, 0.6))
    train = TrainTransform(config, Preprocessing(16))
    for seed in range(100):
        train(image, np.random.default_rng(seed), "x")
    left, upper, right, lower = np.array(boxes).T
    width, height = right - left, lower - upper
    areas = width * height / 8000
    assert 0.28 < areas.min() < 0.35
    assert 0.55 < areas.max() < 0.62
    assert left.min() >= 0
    assert right.max() <= 100
    assert upper.min() >= 0
    assert lower.max() <= 80
    assert (width / height).min() > 0.7
    assert (width / height).max() < 1.4


def test_a_picture_too_narrow_to_crop_is_taken_whole() -> None:
    prepare = Preprocessing(8)
    train = TrainTransform(AugmentConfig(randaugment=False, mirror=False), prepare)
    strip = picture(400, 4)
    assert torch.equal(train(strip, np.random.default_rng(0), "x"), prepare(strip))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "colour", [(200, 40, 40), (40, 160, 60), (60, 60, 220), (210, 190, 40), (220, 120, 40)]
)
def test_no_operation_changes_hue(operation, sign: int, colour: tuple[int, int, int]) -> None:
    # On dark grey with a black corner, so that stretching the channels one by one, or past their
    # end, would show; shifted or turned, the middle still lies in the coloured square.
    image = Image.new("RGB", (32, 32), (60, 60, 60))
    image.paste(colour, (6, 6, 26, 26))
    image.paste((0, 0, 0), (0, 0, 4, 4))
    before = np.asarray(image).copy()
    result = operation(image, 0.7, sign)
    assert (np.asarray(image) == before).all()
    assert result.size == (32, 32)
    assert result.mode == "RGB"
    red, green, blue = np.asarray(result)[16, 16] / 255
    hue, saturation, _ = colorsys.rgb_to_hsv(red, green, blue)
    expected = colorsys.rgb_to_hsv(*(value / 255 for value in colour))
    assert min(abs(hue - expected[0]), 1 - abs(hue - expected[0])) < 0.015
    assert saturation > 0.9 * expected[1]


def test_every_operation_but_identity_does_something() -> None:
    # Muted, so that stretching contrast has room.
    image = Image.eval(picture(32, 32), lambda value: 60 + value // 3)
    same = [op.__name__ for op in OPERATIONS if (np.asarray(op(image, 0.7, 1)) == image).all()]
    assert same == ["_identity"]
