"""Accuracy and cross-entropy of a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from evaluation.options import EvalOptions
from evaluation.samples import BlockReader, evenly_spaced
from evaluation.work_sharding import evaluating, evaluation_autocast
from vlp.data.image.transforms import Preprocessing
from vlp.data.labelled_images import LabelledImages, open_labelled
from vlp.precision import require_finite
from vlp.tasks.classification.task import Classification

BATCH = 256


def evaluate(task: Classification, options: EvalOptions) -> dict[str, float]:
    """Compute top-1 and top-5 accuracy in percent, and the mean cross-entropy in nats."""
    config = task.config.data
    images = open_labelled(config.test, task.classes)
    preprocess = config.preprocessing
    indices = evenly_spaced(len(images), options.limit)
    hits = torch.zeros(2)
    loss = 0.0
    top = min(5, len(task.classes))
    with evaluating(task, options.device) as torch_device, torch.no_grad():
        reader = BlockReader(
            partial(_read, images, preprocess, indices), torch_device, options.workers
        )
        for arrays in reader.values(range(-(-len(indices) // BATCH))):
            pixels, labels = (part.to(torch_device, non_blocking=True) for part in arrays)
            with evaluation_autocast(torch_device, options.precision):
                logits = task.model(pixels)
            logits = require_finite(logits.float())
            hit = logits.topk(top).indices == labels[:, None]
            hits += torch.stack([hit[:, 0].sum(), hit.any(-1).sum()]).cpu()
            loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
    top1, top5 = (100 * hits / len(indices)).tolist()
    return {"top1": top1, "top5": top5, "loss": loss / len(indices)}


def _read(
    images: LabelledImages, preprocess: Preprocessing, indices: Sequence[int], block: int
) -> tuple[Tensor, Tensor]:
    """Read a block's pixels (B, 3, side, side) and labels (B,), in any process."""
    samples = [images.read(index) for index in indices[block * BATCH : (block + 1) * BATCH]]
    pixels = torch.stack([preprocess(sample.image) for sample in samples])
    return pixels, torch.tensor([sample.label for sample in samples])
