"""Accuracy of a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from evaluation.options import EvalOptions
from evaluation.samples import BlockReader, evenly_spread
from evaluation.work_sharding import evaluating, inference
from vlp.data.image.transforms import Preprocessing
from vlp.data.labelled_images import LabelledImages, open_labelled
from vlp.tasks.classification.task import Classification

BATCH = 256


def evaluate(task: Classification, options: EvalOptions) -> dict[str, float]:
    """Compute top-1 and top-5 accuracy in percent, and the mean cross-entropy in nats."""
    config = task.config.data
    images = open_labelled(config.test, task.classes)
    preprocess = config.preprocessing
    numbers = evenly_spread(len(images), options.limit)
    hits = torch.zeros(2)
    loss = 0.0
    top = min(5, len(task.classes))
    with evaluating(task, options.device) as torch_device, torch.no_grad():
        reader = BlockReader(
            partial(_read, images, preprocess, numbers), torch_device, options.workers
        )
        blocks = range(-(-len(numbers) // BATCH))
        with reader.ahead(blocks):
            for block in blocks:
                pixels, labels = (
                    part.to(torch_device, non_blocking=True) for part in reader[block]
                )
                with inference(torch_device, options.precision):
                    logits = task.model(pixels)
                logits = logits.float()
                best = logits.topk(top).indices == labels[:, None]
                hits += torch.stack([best[:, 0].sum(), best.any(-1).sum()]).cpu()
                loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
    top1, top5 = (100 * hits / len(numbers)).tolist()
    return {"top1": top1, "top5": top5, "loss": loss / len(numbers)}


def _read(
    images: LabelledImages, preprocess: Preprocessing, numbers: Sequence[int], block: int
) -> tuple[Tensor, Tensor]:
    """Read a block's pixels (B, 3, side, side) and labels (B,), in any process."""
    samples = [images.read(number) for number in numbers[block * BATCH : (block + 1) * BATCH]]
    pixels = torch.stack([preprocess(sample.image) for sample in samples])
    return pixels, torch.tensor([sample.label for sample in samples])
