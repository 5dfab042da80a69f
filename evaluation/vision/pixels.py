"""Bits per dimension of a model of pixels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from evaluation.samples import BlockReader, evenly_spread
from evaluation.work_sharding import evaluating, inference
from vlp.config import Precision
from vlp.data.labelled_images import LabelledImages, open_labelled
from vlp.tasks.pixels.data import pixel_values
from vlp.tasks.pixels.metrics import bits_per_dimension
from vlp.tasks.pixels.task import Pixels

COLOURS = ("red", "green", "blue")
TOKENS = 2**14  # of one batch


def evaluate(
    task: Pixels,
    limit: int | None = None,
    device: str | None = None,
    precision: Precision | None = None,
    workers: int | None = None,
) -> dict[str, float]:
    """Exact bits per dimension of test images: `bits_per_dim`, and `bits_red` and so on.

    Those of the three colours have the first as their mean.

    Args:
        task: what `load_task` gave.
        limit: only so many images, spread evenly over `data.test`.
        device: where to compute; None is this rank's GPU, or the CPU.
        precision: of the model; None: float32, since a likelihood is read to its third decimal.
        workers: processes that read; None: this rank's cores up to 8 on a GPU, none on a CPU.

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
        reader = BlockReader(partial(_read, images, size, numbers, batch), where, workers)
        blocks = range(-(-len(numbers) // batch))
        with reader.ahead(blocks):
            for block in blocks:
                values = reader[block].to(where, non_blocking=True).long()
                with inference(where, precision or "float32"):
                    found = task.model.nats(values)
                nats += found.double().sum((0, 1, 2)).cpu()
    pixels = len(numbers) * size**2
    figures = {"bits_per_dim": bits_per_dimension(float(nats.sum()), len(COLOURS) * pixels)}
    for colour, found_nats in zip(COLOURS, nats.tolist(), strict=True):
        figures[f"bits_{colour}"] = bits_per_dimension(found_nats, pixels)
    return figures


def _read(
    images: LabelledImages, size: int, numbers: Sequence[int], batch: int, block: int
) -> torch.Tensor:
    """Read a block's pixels (B, size, size, 3), uint8, in any process."""
    read = [images.read(number) for number in numbers[block * batch : (block + 1) * batch]]
    return torch.stack([pixel_values(one.image, size, one.where) for one in read])
