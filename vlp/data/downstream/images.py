"""Pictures of a downstream task as pixels, in training and in evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from vlp.data.image.ablated_views import View, viewed
from vlp.data.image.decode import decode_picture
from vlp.data.image.transforms import Preprocessing, TrainTransform
from vlp.data.shards.sample_files import BadSample, RawSample
from vlp.data.stream.map_dataset import Draws


class PicturePreparation(NamedTuple):
    """How pictures become pixels; `train` is used where draws are given, `evaluate` else."""

    train: TrainTransform
    evaluate: Preprocessing
    view: View
    patch_size: int

    def __call__(
        self, pictures: Sequence[Image.Image], text: str, number: int, draws: Draws | None
    ) -> Tensor:
        """(pictures, 3, size, size) float32, normalised.

        Args:
            pictures: those of one sample.
            text: what is said of them; a picture is not mirrored where it speaks of sides.
            number: of the sample, which fixes the order of shuffled patches in evaluation.
            draws: of training.
        """
        if draws is None:
            pixels = [self.evaluate(picture) for picture in pictures]
            seed = number
        else:
            rng = draws("augment")
            pixels = [self.train(picture, rng, text) for picture in pictures]
            seed = int(draws("view").integers(1 << 62))
        return viewed(torch.stack(pixels), self.view, self.patch_size, seed)


def decoded(raw: RawSample, count: int, where: str) -> list[Image.Image]:
    """The first `count` pictures (1 or 2) of a sample, decoded.

    Raises:
        BadSample: one is missing or cannot be decoded.
    """
    encoded = [raw.image, raw.second_image][:count]
    if any(image is None for image in encoded):
        raise BadSample("missing picture", f"{where}: it has no second picture (KEY.1.jpg)")
    return [decode_picture(image, where) for image in encoded if image is not None]


def panels(picture: Image.Image, count: int) -> list[Image.Image]:
    """A picture cut into `count` parts of one width, from left to right.

    Args:
        picture: of any width; parts differ by a pixel where it does not divide.
        count: 1 gives the picture itself.
    """
    edges = [picture.width * number // count for number in range(count + 1)]
    parts = itertools.pairwise(edges)
    return [picture.crop((left, 0, right, picture.height)) for left, right in parts]
