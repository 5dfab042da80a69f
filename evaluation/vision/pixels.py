"""Bits per dimension of an autoregressive model of pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from evaluation.options import EvalOptions
from evaluation.samples import BlockReader, evenly_spaced
from evaluation.work_sharding import evaluating, evaluation_autocast
from vlp.data.labelled_images import LabelledImages, open_labelled
from vlp.precision import require_finite
from vlp.tasks.pixels.data import pixel_values
from vlp.tasks.pixels.task import Pixels

COLOURS = ("red", "green", "blue")
# Tokens of one batch.
TOKENS = 2**14


def evaluate(task: Pixels, options: EvalOptions) -> dict[str, float]:
    """Compute bits per dimension of test images by channel, `bits_red` ..., and `bits_per_dim`."""
    config = task.config.data
    images = open_labelled(config.test, config.classes)
    size = config.image_size
    indices = evenly_spaced(len(images), options.limit)
    batch = max(1, TOKENS // (len(COLOURS) * size**2))
    nats = torch.zeros(len(COLOURS), dtype=torch.float64)
    with evaluating(task, options.device) as device, torch.no_grad():
        reader = BlockReader(partial(_read, images, size, indices, batch), device, options.workers)
        for pixel_block in reader.values(range(-(-len(indices) // batch))):
            inputs = pixel_block.to(device, non_blocking=True).long()
            with evaluation_autocast(device, options.precision or "float32"):
                batch_nats = task.model.nats(inputs)
            nats += require_finite(batch_nats.double().sum((0, 1, 2))).cpu()
    pixels = len(indices) * size**2
    figures = {"bits_per_dim": float(nats.sum()) / (math.log(2) * (len(COLOURS) * pixels))}
    for colour, channel_nats in zip(COLOURS, nats.tolist(), strict=True):
        figures[f"bits_{colour}"] = channel_nats / (math.log(2) * pixels)
    return figures


def _read(
    images: LabelledImages, size: int, indices: Sequence[int], batch: int, block: int
) -> torch.Tensor:
    """Read a block's pixels (B, size, size, 3), uint8, in any process."""
    samples = [images.read(index) for index in indices[block * batch : (block + 1) * batch]]
    return torch.stack([pixel_values(sample.image, size, sample.where) for sample in samples])
