"""Average precision of a detector, at every size that its configuration names."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import box_convert

from evaluation.core.eval_mode import evaluating
from evaluation.vision.chosen import evenly_spread
from vlp.config import ConfigError
from vlp.data.vision.detection.dataset import evaluation_pixels, open_objects
from vlp.data.vision.detection.objects import ObjectImages
from vlp.metrics.detection import ImageFound, ImageTruth, coco_figures
from vlp.tasks.vision.detection import DetectionTask

BATCH = 16


def evaluate(
    task: DetectionTask, limit: int | None = None, device: str | None = None
) -> dict[str, float]:
    """COCO's figures in percent on `data.test`; see `vlp.metrics.detection.FIGURES`.

    The first size of `data.test_sizes` gives `AP`, `AP50`, ...; further ones `AP@160`, ... .
    Objects are small, medium or large by the pixels of the annotation, of scenes by those of the
    size they are drawn at.

    Args:
        task: what `load_task` gave.
        limit: only so many images, spread evenly.
        device: where to compute; None is this rank's GPU, or the CPU.

    Raises:
        ConfigError: `data.test` cannot be used, or a position encoding cannot serve a size; it is
            named.
        BadSample: an image cannot be read, or has boxes outside of it.
    """
    figures: dict[str, float] = {}
    config = task.config.data
    with evaluating(task, device) as torch_device, torch.no_grad():
        for size in config.evaluation_sizes:
            images = open_objects(config.test, size, task.classes)
            try:
                found = _at_size(task, images, size, limit, torch_device)
            except ValueError as error:
                raise ConfigError(f"images of size {size}: {error}") from error
            suffix = f"@{size}" if figures else ""
            figures |= {f"{name}{suffix}": value for name, value in found.items()}
    return figures


def _at_size(
    task: DetectionTask,
    images: ObjectImages,
    size: int,
    limit: int | None,
    device: torch.device,
) -> dict[str, float]:
    numbers = evenly_spread(len(images), limit)
    truth: list[ImageTruth] = []
    found: dict[int, ImageFound] = {}
    waiting: dict[torch.Size, list[tuple[int, Tensor]]] = defaultdict(list)
    for place, number in enumerate(numbers):
        read = images.read(number)
        sides = read.boxes[:, 2:] - read.boxes[:, :2]
        boxes = np.concatenate([read.boxes[:, :2], sides], -1)
        truth.append(
            ImageTruth(read.width, read.height, boxes, read.labels, read.areas, read.crowds)
        )
        pixels = evaluation_pixels(read, size, task.config.data)
        same = waiting[pixels.shape]
        same.append((place, pixels))
        if len(same) == BATCH:
            found |= _detected(task, same, truth, device)
            same.clear()
    for same in waiting.values():
        found |= _detected(task, same, truth, device)
    return coco_figures(truth, [found[place] for place in range(len(numbers))], task.classes)


def _detected(
    task: DetectionTask,
    images: list[tuple[int, Tensor]],
    truth: list[ImageTruth],
    device: torch.device,
) -> dict[int, ImageFound]:
    """One detection for each query: its best class, and that one's probability (DETR)."""
    if not images:
        return {}
    logits, boxes = task.model([pixels.to(device) for _, pixels in images])
    scores, labels = logits[-1].softmax(-1)[..., :-1].max(-1)
    corners = box_convert(boxes[-1].double(), "cxcywh", "xywh").cpu().numpy()
    return {
        place: ImageFound(
            corners[row] * np.array([truth[place].width, truth[place].height] * 2),
            labels[row].cpu().numpy(),
            scores[row].cpu().numpy(),
        )
        for row, (place, _) in enumerate(images)
    }
