"""Images to tensors: preprocessing of evaluation, and augmentation of training."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import fold, grid_sample, interpolate, unfold

from vlp.config import ConfigError
from vlp.data.config import AugmentConfig
from vlp.data.image.decode import EncodedImage, as_image, pil_to_tensor, upright_rgb
from vlp.io import parse_json, write_json

# ALBEF shifts by at most 10 px of 256.
_SHIFT = 10 / 256

# Value of the uncovered corners of shifted and rotated images: about 0 when normalised.
_FILL = 128.0


# --- RandAugment without operations that change hue, because captions name colours ---
# torchvision and timm stretch and clip each channel by itself, which changes hue. Images are
# float32 (3, height, width) in 0..255, so that operations do not round; `strength` is in 0..1.

# ALBEF's RandAugment(2, 7): number of operations per image, and their magnitude out of 10.
_COUNT, _MAGNITUDE = 2, 7


def randaugment(image: Tensor, rng: np.random.Generator) -> Tensor:
    """Apply random operations with random signs to an image (3, height, width), float32 0..255."""
    for _ in range(_COUNT):
        operation = OPERATIONS[int(rng.integers(len(OPERATIONS)))]
        sign = 1 if rng.random() < 0.5 else -1
        image = operation(image, _MAGNITUDE / 10, sign)
    return image


def _identity(image: Tensor, strength: float, sign: int) -> Tensor:
    return image


def _autocontrast(image: Tensor, strength: float, sign: int) -> Tensor:
    # One stretch for all channels, from the smallest to the largest value of all, keeps hue.
    low, high = map(float, image.aminmax())
    return image if low == high else (image - low).mul_(255 / (high - low))


def _equalize(image: Tensor, strength: float, sign: int) -> Tensor:
    # Equalise the value of HSV: one factor for all channels keeps hue and saturation.
    value = image.amax(0)
    levels = value.round().int().view(-1)
    counts = torch.bincount(levels, minlength=256)
    step = (len(levels) - int(counts[counts.nonzero()[-1]])) // 255
    if step == 0:
        return image
    below = counts.cumsum(0) - counts
    table = ((below + step // 2) // step).clamp(max=255).float()
    return image * (table.index_select(0, levels).view_as(value) / value.clamp(min=1))


def _brightness(image: Tensor, strength: float, sign: int) -> Tensor:
    # Scale the value of HSV, up to 255: clipping scaled RGB at 255 would turn orange into yellow.
    return image * (255 / image.amax(0)).clamp(max=1 + sign * 0.9 * strength)


def _sharpness(image: Tensor, strength: float, sign: int) -> Tensor:
    # Extrapolate from, or interpolate towards, Pillow's smoothed image: the mean of 3 x 3 pixels
    # with weight 5 for the middle, which the sum of nine holds once; weights sum to 13.
    share = sign * 0.9 * strength / 13
    middle = image[:, 1:-1, 1:-1]
    rows = image[:, :-2] + image[:, 1:-1] + image[:, 2:]
    nine = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    sharpened = image.clone()
    sharpened[:, 1:-1, 1:-1] = nine.mul_(-share).add_(middle, alpha=1 + 9 * share).clamp_(0, 255)
    return sharpened


def _shear_x(image: Tensor, strength: float, sign: int) -> Tensor:
    return _affine(image, (1, sign * 0.3 * strength, 0), (0, 1, 0))


def _shear_y(image: Tensor, strength: float, sign: int) -> Tensor:
    return _affine(image, (1, 0, 0), (sign * 0.3 * strength, 1, 0))


def _translate_x(image: Tensor, strength: float, sign: int) -> Tensor:
    return _shift(image, sign * _SHIFT * strength * image.shape[2], 2)


def _translate_y(image: Tensor, strength: float, sign: int) -> Tensor:
    return _shift(image, sign * _SHIFT * strength * image.shape[1], 1)


def _rotate(image: Tensor, strength: float, sign: int) -> Tensor:
    angle = math.radians(sign * 30 * strength)
    cosine, sine = math.cos(angle), math.sin(angle)
    x, y = image.shape[2] / 2, image.shape[1] / 2
    x_row = (cosine, -sine, x - cosine * x + sine * y)
    y_row = (sine, cosine, y - sine * x - cosine * y)
    return _affine(image, x_row, y_row)


def _shift(image: Tensor, offset: float, dim: int) -> Tensor:
    """Shift by `offset` pixels towards the start of `dim`, with linear interpolation."""
    length = image.shape[dim]
    whole = math.floor(offset)
    fraction = offset - whole
    out = torch.full_like(image, _FILL)
    for step, weight in ((whole, 1 - fraction), (whole + 1, fraction)):
        overlap = length - abs(step)
        if weight and overlap > 0:
            source = image.narrow(dim, max(step, 0), overlap)
            out.narrow(dim, max(-step, 0), overlap).add_(source - _FILL, alpha=weight)
    return out


def _affine(
    image: Tensor, x_row: tuple[float, float, float], y_row: tuple[float, float, float]
) -> Tensor:
    """Resample bilinearly: output (x, y) is input (x_row · (x, y, 1), y_row · (x, y, 1)).

    Pixel centres lie at n + 0.5.
    """
    height, width = image.shape[1:]
    x, y = torch.arange(width) + 0.5, (torch.arange(height) + 0.5)[:, None]
    grid = torch.empty(1, height, width, 2)
    for axis, (x_weight, y_weight, offset), size in ((0, x_row, width), (1, y_row, height)):
        # grid_sample's coordinates go from -1 to 1 over the image.
        torch.add(
            x * (2 * x_weight / size),
            y * (2 * y_weight / size) + (2 * offset / size - 1),
            out=grid[0, ..., axis],
        )
    minus_fill = (image - _FILL)[None]  # grid_sample takes 0 outside of the image
    return grid_sample(minus_fill, grid, align_corners=False)[0].add_(_FILL)


OPERATIONS: tuple[Callable[[Tensor, float, int], Tensor], ...] = (
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


FILE_NAME = "processor_config.json"  # transformers' name

RGB = tuple[float, float, float]

# As in timm's `augreg` ViTs: pixels are in [-1, 1], which MIM regresses.
MEAN: RGB = (0.5, 0.5, 0.5)
STD = MEAN

# `left`, `right`, `leftmost`, `right-hand`, ...: a flip would make such captions false.
_SIDES = re.compile(r"\b(?:left|right)", re.IGNORECASE)

Box = tuple[int, int, int, int]  # left, upper, right, lower in pixels
AnyImage = Image.Image | EncodedImage


class Preprocessing:
    """Bicubic resizing to a square without a crop, then normalisation, as in ALBEF's evaluation.

    `mean` and `std` are per channel, for pixel values in [0, 1].
    """

    def __init__(self, image_size: int, mean: RGB = MEAN, std: RGB = STD) -> None:
        self.image_size = image_size
        self.mean = mean
        self.std = std

    def __call__(self, image: Any) -> Tensor:
        """Prepare an image, a path, an array or a tensor -> (3, image_size, image_size) float32."""
        return self.normalise(self.squash(as_image(image)))

    def squash(self, image: Image.Image) -> Image.Image:
        """Return an image of any mode and size as upright RGB of image_size x image_size."""
        # Not cropped, as captions may name objects near the borders.
        size = (self.image_size, self.image_size)
        image = upright_rgb(image)
        return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)

    def normalise(self, image: Image.Image | Tensor) -> Tensor:
        """Convert an RGB image, or its tensor (3, height, width) in 0..255, to float32."""
        pixels = image if isinstance(image, Tensor) else pil_to_tensor(image)
        return normalise(pixels, self.mean, self.std)

    def save(self, folder: str | Path) -> None:
        """Write `processor_config.json`, which transformers' `AutoProcessor` reads, too."""
        side = self.image_size
        image_processor = {
            "image_processor_type": "VlpImageProcessor",
            "size": {"height": side, "width": side},
            "image_mean": self.mean,
            "image_std": self.std,
        }
        config = {"processor_class": "VlpProcessor", "image_processor": image_processor}
        write_json(Path(folder) / FILE_NAME, config)

    @classmethod
    def load(cls, folder: str | Path) -> Preprocessing:
        """Read `processor_config.json`."""
        path = Path(folder) / FILE_NAME
        try:
            settings = parse_json(path.read_text(encoding="utf-8"))["image_processor"]
            red, green, blue = settings["image_mean"]
            red_std, green_std, blue_std = settings["image_std"]
            side = int(settings["size"]["height"])
            return cls(side, (red, green, blue), (red_std, green_std, blue_std))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: not a preprocessing file ({error!r})") from error


def normalise(image: Tensor, mean: RGB = MEAN, std: RGB = STD) -> Tensor:
    """Return (x / 255 - mean) / std of images (..., 3, height, width): float32, on their device."""
    pixels = image.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    # Two passes over the pixels instead of three. Python numbers, as copying a tensor to a GPU
    # waits for the work that is queued there.
    scales = (1 / (255 * torch.tensor(std))).tolist()
    shifts = (torch.tensor(mean) / torch.tensor(std)).tolist()
    for channel, scale, shift in zip(pixels.unbind(-3), scales, shifts):
        channel.mul_(scale).sub_(shift)
    return pixels


class TrainTransform:
    """Random crop, horizontal flip and RandAugment, drawn from the caller's generator."""

    def __init__(self, config: AugmentConfig, preprocessing: Preprocessing) -> None:
        self.config = config
        self.preprocessing = preprocessing

    def __call__(self, image: AnyImage, rng: np.random.Generator, caption: str) -> Tensor:
        """Convert to (3, image_size, image_size) float32; no flip if `caption` names a side."""
        return self.preprocessing.normalise(self.prepare(image, rng, caption)())

    def prepare(
        self, image: AnyImage, rng: np.random.Generator, caption: str
    ) -> Callable[[], Tensor]:
        """Draw crop and flip; return a function that computes the uint8 pixels; call it once."""
        image, box, hflip = self._draw(image, rng, not mentions_side(caption))
        return partial(self._augment, image, box, hflip, rng)

    def view(
        self, image: AnyImage, rng: np.random.Generator, may_flip: bool
    ) -> tuple[Tensor, bool]:
        """Return pixels (3, image_size, image_size) uint8, and whether they are flipped."""
        image, box, hflip = self._draw(image, rng, may_flip)
        return self._augment(image, box, hflip, rng), hflip

    def _draw(
        self, image: AnyImage, rng: np.random.Generator, may_flip: bool
    ) -> tuple[AnyImage, Box, bool]:
        """Return the upright image, a crop, and whether to flip it."""
        if isinstance(image, Image.Image):
            image = upright_rgb(image)
        box = random_crop(*image.size, self.config.crop_scale, rng)
        # Drawn in any case, so that later draws do not depend on `may_flip`.
        return image, box, rng.random() < 0.5 and self.config.hflip and may_flip

    def _augment(self, image: AnyImage, box: Box, hflip: bool, rng: np.random.Generator) -> Tensor:
        pixels = self._crop(image, box)
        if hflip:
            pixels = pixels.flip(2)
        if self.config.randaugment:
            pixels = pixels.to(torch.float32, memory_format=torch.contiguous_format)
            pixels = randaugment(pixels, rng)
            pixels = pixels.round_().clamp_(0, 255).to(torch.uint8)
        return pixels

    def _crop(self, image: AnyImage, box: Box) -> Tensor:
        # Without crops Pillow resizes images, to the same pixels as in evaluation.
        if self.config.crop_scale[0] >= 1:
            whole = image if isinstance(image, Image.Image) else image.image()
            return pil_to_tensor(self.preprocessing.squash(whole))
        side = self.preprocessing.image_size
        if isinstance(image, Image.Image):
            pixels = pil_to_tensor(image)
        elif self.config.quick_decode:
            pixels = image.decode(_min_size(image.size, box, side))
        else:
            pixels = image.decode()
        # Scale the box to the decoded size, rounding outwards.
        (width, height), (rows, columns) = image.size, pixels.shape[1:]
        left, upper = box[0] * columns // width, box[1] * rows // height
        right, lower = -(-box[2] * columns // width), -(-box[3] * rows // height)
        part = pixels[None, :, upper:lower, left:right]
        # On uint8 PyTorch's filter is three times as fast as Pillow's, and within one level.
        return interpolate(part, (side, side), mode="bicubic", antialias=True)[0]


def mentions_side(caption: str) -> bool:
    """Return whether a caption says left or right, which a flip would make false."""
    return _SIDES.search(caption) is not None


def _min_size(size: tuple[int, int], box: Box, side: int) -> tuple[int, int]:
    """Return (width, height) of the image at which the crop has at least `side` pixels a side."""
    left, upper, right, lower = box
    return math.ceil(size[0] * side / (right - left)), math.ceil(size[1] * side / (lower - upper))


def random_crop(
    width: int, height: int, scale: tuple[float, float], rng: np.random.Generator
) -> Box:
    """Draw torchvision's RandomResizedCrop: share of area in `scale`, aspect ratio 3/4..4/3."""
    if scale[0] >= 1:
        return 0, 0, width, height
    # Draw the numbers of all ten tries at once, as a call costs more than the numbers.
    for area_position, aspect_position in rng.random((10, 2)).tolist():
        area = width * height * (scale[0] + (scale[1] - scale[0]) * area_position)
        aspect = (3 / 4) ** (1 - 2 * aspect_position)  # log-uniform
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left = int(rng.integers(width - w + 1))
            upper = int(rng.integers(height - h + 1))
            return left, upper, left + w, upper + h
    return 0, 0, width, height


View = Literal["image", "shuffled", "blank"]  # shuffled: its patches; blank: grey


def apply_view(pixels: Tensor, view: View, patch_size: int, seed: int) -> Tensor:
    """Return images (images, 3, height, width) in a view; each has its own order of patches."""
    if view == "blank":
        return torch.zeros_like(pixels)
    if view == "image":
        return pixels
    # Roll by a random part of a patch: else the edges of cut objects would reveal patch positions.
    generator = torch.Generator().manual_seed(seed)
    shifts = torch.randint(patch_size, (len(pixels), 2), generator=generator).tolist()
    rolled = torch.stack([image.roll(shift, (-2, -1)) for image, shift in zip(pixels, shifts)])
    patches = unfold(rolled, patch_size, stride=patch_size)  # (images, values, patches)
    count = patches.shape[-1]
    orders = [torch.randperm(count, generator=generator) for _ in patches]
    shuffled = torch.stack([patch[:, order] for patch, order in zip(patches, orders)])
    return fold(shuffled, pixels.shape[-2:], patch_size, stride=patch_size)
