"""Ablated inputs in place of an image, to measure what a model owes to the image."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import fold, unfold

View = Literal["image", "shuffled", "blank"]
"""The image; patches of it in random order, so that nothing is where it was; a plain grey."""


def viewed(pixels: Tensor, view: View, patch_size: int, seed: int) -> Tensor:
    """Show images as the view wants them; each one's patches have an order of their own.

    Before it is cut to be shuffled, an image is moved by a random part of a patch, out at one side
    and in at the other: where the grid cuts a thing would tell where the thing lay.

    Args:
        pixels: (images, 3, height, width).
        view: what is shown.
        patch_size: side of a patch in pixels.
        seed: of the moves and orders.
    """
    if view == "blank":
        return torch.zeros_like(pixels)
    if view == "image":
        return pixels
    generator = torch.Generator().manual_seed(seed)
    shifts = torch.randint(patch_size, (len(pixels), 2), generator=generator).tolist()
    moved = torch.stack([torch.roll(one, by, (-2, -1)) for one, by in zip(pixels, shifts)])
    patches = unfold(moved, patch_size, stride=patch_size)  # (images, values, patches)
    count = patches.shape[-1]
    orders = [torch.randperm(count, generator=generator) for _ in patches]
    mixed = torch.stack([patch[:, order] for patch, order in zip(patches, orders)])
    return fold(mixed, pixels.shape[-2:], patch_size, stride=patch_size)
