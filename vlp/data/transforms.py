"""Pictures to tensors: the plain preparation of evaluation, and the augmented one of training."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from vlp.config import ConfigError
from vlp.data.config import AugmentConfig

FILE_NAME = "preprocessing.json"

# As timm's `augreg` ViTs were trained; close to the range [-1, 1] that MIM regresses.
MEAN = STD = (0.5, 0.5, 0.5)

# `left`, `right`, `leftmost`, `right-hand`, ...: a mirrored picture would make the caption false.
_SIDES = re.compile(r"\b(?:left|right)", re.IGNORECASE)

# Uncovered corners of shifted and turned pictures: mid grey, which normalises to about zero.
_FILL = (128, 128, 128)


class Preprocessing:
    """Squash a picture to a square, bicubic, and normalise it (as ALBEF evaluates).

    Nothing is cropped, so whatever a caption names stays in the picture.

    Args:
        image_size: side in pixels.
        mean: per channel, of pixel values in [0, 1].
        std: per channel.
    """

    def __init__(
        self,
        image_size: int,
        mean: tuple[float, float, float] = MEAN,
        std: tuple[float, float, float] = STD,
    ) -> None:
        self.image_size = image_size
        self.mean = mean
        self.std = std
        # (x / 255 - mean) / std in two steps over the pixels instead of three.
        self._scale = 1 / (255 * torch.tensor(std).view(3, 1, 1))
        self._shift = (torch.tensor(mean) / torch.tensor(std)).view(3, 1, 1)

    def __call__(self, image: Image.Image) -> Tensor:
        """A picture of any mode and size to (3, image_size, image_size) float32."""
        size = (self.image_size, self.image_size)
        image = image.convert("RGB")
        return self.normalise(image if image.size == size else image.resize(size, _BICUBIC))

    def normalise(self, image: Image.Image) -> Tensor:
        """An RGB picture to (3, height, width) float32, its size unchanged."""
        channels = torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1)
        pixels = channels.to(torch.float32, memory_format=torch.contiguous_format)
        return pixels.mul_(self._scale).sub_(self._shift)

    def save(self, folder: str | Path) -> None:
        """Write `preprocessing.json`."""
        settings = {"image_size": self.image_size, "mean": self.mean, "std": self.std}
        path = Path(folder) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Preprocessing:
        """Read `preprocessing.json`.

        Raises:
            ConfigError: it is not there, or not what `save` writes.
        """
        path = Path(folder) / FILE_NAME
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
            red, green, blue = settings["mean"]
            red_std, green_std, blue_std = settings["std"]
            return cls(
                int(settings["image_size"]), (red, green, blue), (red_std, green_std, blue_std)
            )
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: not a preprocessing file ({error!r})") from error


class TrainTransform:
    """Random crop, RandAugment and mirror; every choice comes from the given generator.

    RandAugment follows ALBEF's: `operations` picks (with replacement) out of the operations below,
    all at one `magnitude` of 10, signs random. None of them changes hue, because captions name
    colours.
    """

    def __init__(self, config: AugmentConfig, preprocessing: Preprocessing) -> None:
        self.config = config
        self.preprocessing = preprocessing

    @property
    def keeps_places(self) -> bool:
        """Whether what lies at a place of the picture lies there in the pixels too."""
        return (
            not self.config.randaugment
            and not self.config.mirror
            and self.config.crop_scale[0] >= 1
        )

    def __call__(self, image: Image.Image, rng: np.random.Generator, caption: str) -> Tensor:
        """A picture to (3, image_size, image_size) float32; `caption` decides about mirroring."""
        size = self.preprocessing.image_size
        box = random_crop(*image.size, self.config.crop_scale, rng)
        image = image.convert("RGB")
        if image.size != (size, size) or box != (0, 0, size, size):
            image = image.resize((size, size), _BICUBIC, box=box)
        # Drawn even where the caption forbids it, so the draws that follow stay the same.
        mirror = rng.random() < 0.5
        if self.config.mirror and mirror and not _SIDES.search(caption):
            image = ImageOps.mirror(image)
        if self.config.randaugment:
            for _ in range(self.config.operations):
                operation = OPERATIONS[int(rng.integers(len(OPERATIONS)))]
                sign = 1 if rng.random() < 0.5 else -1
                image = operation(image, self.config.magnitude / 10, sign)
        return self.preprocessing.normalise(image)


def random_crop(
    width: int, height: int, scale: tuple[float, float], rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """torchvision's random resized crop: area in `scale`, aspect in 3/4..4/3; (l, u, r, d) px."""
    if scale[0] >= 1:
        return 0, 0, width, height
    for _ in range(10):
        area = width * height * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left = int(rng.integers(width - w + 1))
            upper = int(rng.integers(height - h + 1))
            return left, upper, left + w, upper + h
    return 0, 0, width, height


def _affine(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=_FILL
    )


def _identity(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return image


def _autocontrast(image: Image.Image, strength: float, sign: int) -> Image.Image:
    # One stretch for all channels, from the darkest to the brightest value of any: stretched one by
    # one, or past 255, they would change hue.
    extrema = np.array(image.getextrema())
    low, high = int(extrema.min()), int(extrema.max())
    if low == high:
        return image
    table = [round(255 * min(max(value - low, 0) / (high - low), 1)) for value in range(256)]
    return image.point(table * 3)


def _equalize(image: Image.Image, strength: float, sign: int) -> Image.Image:
    hue, saturation, value = image.convert("HSV").split()
    return Image.merge("HSV", (hue, saturation, ImageOps.equalize(value))).convert("RGB")


def _brightness(image: Image.Image, strength: float, sign: int) -> Image.Image:
    # On the value alone: RGB scaled past 255 turns orange into yellow.
    factor = 1 + sign * 0.9 * strength
    hue, saturation, value = image.convert("HSV").split()
    value = value.point([min(round(factor * level), 255) for level in range(256)])
    return Image.merge("HSV", (hue, saturation, value)).convert("RGB")


def _sharpness(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return ImageEnhance.Sharpness(image).enhance(1 + sign * 0.9 * strength)


def _shear_x(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return _affine(image, (1, sign * 0.3 * strength, 0, 0, 1, 0))


def _shear_y(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return _affine(image, (1, 0, 0, sign * 0.3 * strength, 1, 0))


def _translate_x(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return _affine(image, (1, 0, sign * _SHIFT * strength * image.width, 0, 1, 0))


def _translate_y(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return _affine(image, (1, 0, 0, 0, 1, sign * _SHIFT * strength * image.height))


def _rotate(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return image.rotate(sign * 30 * strength, Image.Resampling.BILINEAR, fillcolor=_FILL)


_BICUBIC = Image.Resampling.BICUBIC

# ALBEF shifts by at most 10 px of 256.
_SHIFT = 10 / 256

OPERATIONS: tuple[Callable[[Image.Image, float, int], Image.Image], ...] = (
    _identity,
    _autocontrast,
    _equalize,
    _brightness,
    _sharpness,
    _shear_x,
    _shear_y,
    _translate_x,
    _translate_y,
    _rotate,
)
