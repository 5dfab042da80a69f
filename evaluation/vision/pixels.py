"""Bits per dimension of a model of pixels."""

from __future__ import annotations

import torch

from evaluation.core.eval_mode import evaluating
from evaluation.vision.chosen import evenly_spread
from vlp.data.vision.labelled_images import open_labelled
from vlp.data.vision.pixels import pixel_values
from vlp.metrics.likelihood import bits_per_dimension
from vlp.tasks.vision.pixels import Pixels

COLOURS = ("red", "green", "blue")
TOKENS = 2**14  # of one batch


def evaluate(task: Pixels, limit: int | None = None, device: str | None = None) -> dict[str, float]:
    """Exact bits per dimension of test images: `bits_per_dim`, and `bits_red` and so on.

    Those of the three colours have the first as their mean.

    Args:
        task: what `load_task` gave.
        limit: only so many images, spread evenly over `data.test`.
        device: where to compute; None is this rank's GPU, or the CPU.

    Raises:
        ConfigError: `data.test` cannot be opened.
        BadSample: one of its images cannot be read, or is too small.
    """
    config = task.config.data
    images = open_labelled(config.test, config.classes)
    size = config.image_size
    numbers = evenly_spread(len(images), limit)
    batch = max(1, TOKENS // (len(COLOURS) * size**2))
    nats = torch.zeros(len(COLOURS), dtype=torch.float64)
    with evaluating(task, device) as where, torch.no_grad():
        for start in range(0, len(numbers), batch):
            read = [images.read(number) for number in numbers[start : start + batch]]
            values = torch.stack([pixel_values(one.image, size, one.where) for one in read])
            found = task.model.nats(values.to(where).long())
            nats += found.double().sum((0, 1, 2)).cpu()
    pixels = len(numbers) * size**2
    figures = {"bits_per_dim": bits_per_dimension(float(nats.sum()), len(COLOURS) * pixels)}
    for colour, found_nats in zip(COLOURS, nats.tolist(), strict=True):
        figures[f"bits_{colour}"] = bits_per_dimension(found_nats, pixels)
    return figures
