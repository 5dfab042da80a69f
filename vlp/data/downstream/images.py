"""Images of a downstream task as pixels, in training and in evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from vlp.data.image.ablated_views import View, viewed
from vlp.data.image.decode import decode_image
from vlp.data.image.transforms import Preprocessing, TrainTransform
from vlp.data.shards.sample_files import BadSample, RawSample
from vlp.data.stream.map_dataset import RngFactory


class ImagePreparation(NamedTuple):
    """Preparation of images: `train` where `rng_for` is given, else `evaluate`."""

    train: TrainTransform
    evaluate: Preprocessing
    view: View
    patch_size: int

    def __call__(
        self, images: Sequence[Image.Image], text: str, number: int, rng_for: RngFactory | None
    ) -> Tensor:
        """Make (images, 3, size, size) float32 pixels, normalised.

        Args:
            images: those of one sample.
            text: what is said of them; an image is not flipped where it speaks of sides.
            number: of the sample, which fixes the order of shuffled patches in evaluation.
            rng_for: of training.
        """
        if rng_for is None:
            pixels = [self.evaluate(image) for image in images]
            seed = number
        else:
            rng = rng_for("augment")
            pixels = [self.train(image, rng, text) for image in images]
            seed = int(rng_for("view").integers(1 << 62))
        return viewed(torch.stack(pixels), self.view, self.patch_size, seed)


def decoded(raw: RawSample, count: int, where: str) -> list[Image.Image]:
    """Decode the first `count` images (1 or 2) of a sample.

    Raises:
        BadSample: one is missing or cannot be decoded.
    """
    encoded = [raw.image, raw.second_image][:count]
    if any(image is None for image in encoded):
        raise BadSample("missing image", f"{where}: it has no second image (KEY.1.jpg)")
    return [decode_image(image, where) for image in encoded if image is not None]


def panels(image: Image.Image, count: int) -> list[Image.Image]:
    """Cut an image into `count` parts of one width, from left to right.

    Args:
        image: of any width; parts differ by a pixel where it does not divide.
        count: 1 gives the image itself.
    """
    edges = [image.width * number // count for number in range(count + 1)]
    parts = itertools.pairwise(edges)
    return [image.crop((left, 0, right, image.height)) for left, right in parts]
