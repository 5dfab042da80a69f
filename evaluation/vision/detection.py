"""Average precision of a detector, at every test size of its configuration."""

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
from evaluation.samples import BlockReader, evenly_spaced
from evaluation.work_sharding import evaluating, evaluation_autocast
from vlp.config import ConfigError, Precision
from vlp.tasks.detection.data import (
    DetectionDataConfig,
    ObjectImages,
    evaluation_pixels,
    open_objects,
)
from vlp.tasks.detection.metrics import ImageDetections, ImageTruth, coco_figures
from vlp.tasks.detection.task import DetectionTask

BATCH = 16


def evaluate(task: DetectionTask, options: EvalOptions) -> dict[str, float]:
    """Compute COCO's figures in percent on `data.test` (`vlp.tasks.detection.metrics.FIGURES`).

    Figures are called `AP`, `AP50`, ... at the first size of `data.test_sizes`, and `AP@160`, ...
    at others. Objects are small, medium or large by their area in pixels of the annotated image; a
    generated scene is drawn at the test size.
    """
    figures: dict[str, float] = {}
    config = task.config.data
    with evaluating(task, options.device) as torch_device, torch.no_grad():
        for size in config.evaluation_sizes:
            images = open_objects(config.test, size, task.classes)
            try:
                size_figures = _evaluate_size(task, images, size, options, torch_device)
            except ValueError as error:
                raise ConfigError(f"images of size {size}: {error}") from error
            suffix = f"@{size}" if figures else ""
            figures |= {f"{name}{suffix}": value for name, value in size_figures.items()}
    return figures


def _evaluate_size(
    task: DetectionTask, images: ObjectImages, size: int, options: EvalOptions, device: torch.device
) -> dict[str, float]:
    indices = evenly_spaced(len(images), options.limit)
    truth: list[ImageTruth] = []
    detections: dict[int, ImageDetections] = {}
    buckets: dict[torch.Size, list[tuple[int, Tensor]]] = defaultdict(list)
    reader = BlockReader(
        partial(_read, images, size, task.config.data, indices), device, options.workers
    )
    # A batch has images of one shape: images of other shapes wait in their buckets.
    for target, pixels in chain.from_iterable(reader.values(range(-(-len(indices) // BATCH)))):
        bucket = buckets[pixels.shape]
        # A copy, as a view would keep its whole block in memory.
        bucket.append((len(truth), pixels.clone()))
        truth.append(target)
        if len(bucket) == BATCH:
            detections |= _detect(task, bucket, truth, device, options.precision)
            bucket.clear()
    for bucket in buckets.values():
        detections |= _detect(task, bucket, truth, device, options.precision)
    return coco_figures(truth, [detections[index] for index in range(len(indices))], task.classes)


def _read(
    images: ObjectImages, size: int, data: DetectionDataConfig, indices: Sequence[int], block: int
) -> list[tuple[ImageTruth, Tensor]]:
    """Read the truth and the pixels of a block's images, in any process."""
    samples = []
    for index in indices[block * BATCH : (block + 1) * BATCH]:
        image = images.read(index)
        # From corners to [x, y, width, height].
        extents = image.boxes[:, 2:] - image.boxes[:, :2]
        boxes = np.concatenate([image.boxes[:, :2], extents], -1)
        truth = ImageTruth(
            image.width, image.height, boxes, image.labels, image.areas, image.crowds
        )
        samples.append((truth, evaluation_pixels(image, size, data)))
    return samples


def _detect(
    task: DetectionTask,
    images: list[tuple[int, Tensor]],
    truth: list[ImageTruth],
    device: torch.device,
    precision: Precision | None,
) -> dict[int, ImageDetections]:
    """Return detections by image index, a box per query with its likeliest class.

    images: (index, pixels) of images of one shape. truth: by index.
    """
    if not images:
        return {}
    with evaluation_autocast(device, precision):
        logits, boxes = task.model([pixels.to(device, non_blocking=True) for _, pixels in images])
    # Of the last decoder layer, without the last class, `no object`.
    scores, labels = logits[-1].softmax(-1)[..., :-1].max(-1)
    # As shares of the image.
    xywh = box_convert(boxes[-1].double(), "cxcywh", "xywh").cpu().numpy()
    return {
        index: ImageDetections(
            xywh[row] * np.array([truth[index].width, truth[index].height] * 2),
            labels[row].cpu().numpy(),
            scores[row].cpu().numpy(),
        )
        for row, (index, _) in enumerate(images)
    }
