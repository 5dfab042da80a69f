"""Accuracy of a classifier."""

from __future__ import annotations

import torch

from evaluation.core.eval_mode import evaluating
from evaluation.vision.chosen import evenly_spread
from vlp.data.vision.labelled_images import open_labelled
from vlp.tasks.vision.classification import Classification

BATCH = 256


def evaluate(
    task: Classification, limit: int | None = None, device: str | None = None
) -> dict[str, float]:
    """Top-1 and top-5 accuracy in percent, and the mean cross-entropy in nats.

    Args:
        task: what `load_task` gave.
        limit: only so many images, spread evenly over `data.test`.
        device: where to compute; None is this rank's GPU, or the CPU.

    Raises:
        ConfigError: `data.test` cannot be opened.
        BadSample: one of its images cannot be read.
    """
    config = task.config.data
    images = open_labelled(config.test, task.classes)
    preprocess = config.preprocessing
    numbers = evenly_spread(len(images), limit)
    hits = torch.zeros(2)
    loss = 0.0
    top = min(5, len(task.classes))
    with evaluating(task, device) as torch_device, torch.no_grad():
        for start in range(0, len(numbers), BATCH):
            read = [images.read(number) for number in numbers[start : start + BATCH]]
            pixels = torch.stack([preprocess(one.image) for one in read]).to(torch_device)
            labels = torch.tensor([one.label for one in read], device=torch_device)
            logits = task.model(pixels).float()
            best = logits.topk(top).indices == labels[:, None]
            hits += torch.stack([best[:, 0].sum(), best.any(-1).sum()]).cpu()
            loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
    top1, top5 = (100 * hits / len(numbers)).tolist()
    return {"top1": top1, "top5": top5, "loss": loss / len(numbers)}
