"""Average precision of a detector, at every size that its configuration names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import box_convert

from evaluation.options import EvalOptions
from evaluation.samples import BlockReader, evenly_spread
from evaluation.work_sharding import evaluating, inference
from vlp.config import ConfigError, Precision
from vlp.tasks.detection.data import (
    DetectionDataConfig,
    ObjectImages,
    evaluation_pixels,
    open_objects,
)
from vlp.tasks.detection.metrics import ImageFound, ImageTruth, coco_figures
from vlp.tasks.detection.task import DetectionTask

BATCH = 16


def evaluate(task: DetectionTask, options: EvalOptions) -> dict[str, float]:
    """Compute COCO's figures in percent on `data.test` (`vlp.tasks.detection.metrics.FIGURES`).

    The first size of `data.test_sizes` gives `AP`, `AP50`, ...; further ones `AP@160`, ... .
    Objects are small, medium or large by annotation pixels, in scenes by pixels at the drawn size.
    """
    figures: dict[str, float] = {}
    config = task.config.data
    with evaluating(task, options.device) as torch_device, torch.no_grad():
        for size in config.evaluation_sizes:
            images = open_objects(config.test, size, task.classes)
            try:
                found = _at_size(task, images, size, options, torch_device)
            except ValueError as error:
                raise ConfigError(f"images of size {size}: {error}") from error
            suffix = f"@{size}" if figures else ""
            figures |= {f"{name}{suffix}": value for name, value in found.items()}
    return figures


def _at_size(
    task: DetectionTask, images: ObjectImages, size: int, options: EvalOptions, device: torch.device
) -> dict[str, float]:
    numbers = evenly_spread(len(images), options.limit)
    truth: list[ImageTruth] = []
    found: dict[int, ImageFound] = {}
    waiting: dict[torch.Size, list[tuple[int, Tensor]]] = defaultdict(list)
    reader = BlockReader(
        partial(_read, images, size, task.config.data, numbers), device, options.workers
    )
    blocks = range(-(-len(numbers) // BATCH))
    with reader.ahead(blocks):
        for one, pixels in chain.from_iterable(map(reader.__getitem__, blocks)):
            same = waiting[pixels.shape]
            same.append((len(truth), pixels.clone()))  # a view would keep its whole block
            truth.append(one)
            if len(same) == BATCH:
                found |= _detected(task, same, truth, device, options.precision)
                same.clear()
    for same in waiting.values():
        found |= _detected(task, same, truth, device, options.precision)
    return coco_figures(truth, [found[place] for place in range(len(numbers))], task.classes)


def _read(
    images: ObjectImages, size: int, data: DetectionDataConfig, numbers: Sequence[int], block: int
) -> list[tuple[ImageTruth, Tensor]]:
    """Read the truth and the pixels of a block's images, in any process."""
    found = []
    for number in numbers[block * BATCH : (block + 1) * BATCH]:
        read = images.read(number)
        sides = read.boxes[:, 2:] - read.boxes[:, :2]
        boxes = np.concatenate([read.boxes[:, :2], sides], -1)
        truth = ImageTruth(read.width, read.height, boxes, read.labels, read.areas, read.crowds)
        found.append((truth, evaluation_pixels(read, size, data)))
    return found


def _detected(
    task: DetectionTask,
    images: list[tuple[int, Tensor]],
    truth: list[ImageTruth],
    device: torch.device,
    precision: Precision | None,
) -> dict[int, ImageFound]:
    """Return one detection for each query: its best class with its probability (DETR)."""
    if not images:
        return {}
    with inference(device, precision):
        logits, boxes = task.model([pixels.to(device, non_blocking=True) for _, pixels in images])
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
