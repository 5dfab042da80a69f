"""Object detection: DETR, trained by matching its queries with the objects of an image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from pydantic import Field

from vlp.config import Config, ConfigError
from vlp.data.stream.loader import OrderedData, indexed_data
from vlp.objectives.loss import Loss
from vlp.precision import full_precision
from vlp.tasks.detection.data import (
    DetectionBatch,
    DetectionDataConfig,
    DetectionSamples,
    collate,
    fit_size,
    open_objects,
)
from vlp.tasks.detection.loss import SetLosses, set_losses
from vlp.tasks.detection.model import Detr, DetrConfig
from vlp.tasks.task import Precision, StepOutput
from vlp.tasks.vision_only import VisionTask

LOSSES = ("classes", "l1", "giou")
AUXILIARY = "auxiliary_"


class SetLossConfig(Config):
    """Weights of DETR's loss and of its matching."""

    classes: float = Field(1.0, ge=0, description="weight of the classes' cross-entropy")
    l1: float = Field(
        5.0, ge=0, description="weight of the L1 distance of boxes, in shares of the image"
    )
    giou: float = Field(2.0, ge=0, description="weight of 1 - generalised IoU of boxes")
    no_object: float = Field(0.1, gt=0, le=1, description="weight of the class 'no object'")
    auxiliary: bool = Field(True, description="losses of every decoder layer, not only the last")


class DetectionConfig(Config):
    """Model, images and loss."""

    kind: Literal["detection"] = Field("detection", description="selects this class")
    model: DetrConfig = Field(DetrConfig(), description="sizes of DETR, and its position encodings")
    data: DetectionDataConfig = Field(description="images with boxes")
    loss: SetLossConfig = Field(SetLossConfig(), description="weights of the loss")


class DetectionTask(VisionTask):
    """DETR's loss: classes of all queries, L1 and GIoU of queries matched with objects."""

    config_class = DetectionConfig

    def __init__(
        self, config: DetectionConfig, classes: tuple[str, ...], precision: Precision = "float32"
    ) -> None:
        super().__init__(config, precision)
        self.classes = tuple(classes)
        self.model = Detr(config.model, len(self.classes), config.data.largest_side)

    def forward(self, batch: DetectionBatch, step: int) -> StepOutput:
        """Compute the last decoder layer's losses, and sums over other layers: `auxiliary_...`."""
        # Without a good image, a blank one, whose outputs are dropped, runs the model on this rank.
        side, device = self.config.data.multiple, self.model.project.weight.device
        pixels = batch.pixels or (torch.zeros(3, side, side, device=device),)
        with self.autocast(pixels[0].device):
            outputs = self.model(pixels)
        logits, boxes = (part[:, : len(batch.labels)] for part in full_precision(*outputs))
        weights = self.config.loss
        if not weights.auxiliary:
            logits, boxes = logits[-1:], boxes[-1:]
        layers = set_losses(
            logits, boxes, batch.labels, batch.boxes,
            (weights.classes, weights.l1, weights.giou), weights.no_object,
        )  # fmt: skip
        losses = _losses_by_name(layers)
        scales = {name: getattr(weights, name.removeprefix(AUXILIARY)) for name in losses}
        last = layers[-1]
        return self.step_output(
            losses,
            scales,
            {
                "right_class": last.num_correct / last.num_matched.clamp(min=1),
                "overlap": 1 - last.giou.total.detach() / last.num_matched.clamp(min=1),
            },
        )

    def metadata(self) -> dict[str, Any]:
        """Return the class names."""
        return {"classes": self.classes}

    @classmethod
    def restore(cls, config: DetectionConfig, metadata: Mapping[str, Any]) -> Self:
        """Create the task of a model folder with initial weights, never public ones."""
        backbone = config.model.backbone.model_copy(update={"pretrained": False})
        model = config.model.model_copy(update={"backbone": backbone})
        return cls(config.model_copy(update={"model": model}), tuple(metadata["classes"]))


def build(
    config: DetectionConfig, batch: int, seed: int, precision: Precision
) -> tuple[DetectionTask, OrderedData]:
    """Build the task and its training data."""
    data = config.data
    images = open_objects(data.train, max(data.sizes))
    open_objects(data.test, max(data.evaluation_sizes), images.classes)  # its errors come early
    task = DetectionTask(config, images.classes, precision)
    for size in dict.fromkeys((min(data.sizes), max(data.sizes), *data.evaluation_sizes)):
        _require_size(task.model, data, size)
    samples = DetectionSamples(images, data, config.model.queries)
    return task, indexed_data(len(images), samples, collate, data, batch, seed)


def _losses_by_name(layers: list[SetLosses]) -> dict[str, Loss]:
    *others, last = layers
    losses = {name: getattr(last, name) for name in LOSSES}
    if others:
        for name in LOSSES:
            totals = [getattr(layer, name).total for layer in others]
            losses[AUXILIARY + name] = Loss(torch.stack(totals).sum(), losses[name].count)
    return losses


def _require_size(model: Detr, data: DetectionDataConfig, size: int) -> None:
    """Require that the encodings support square images, and the widest and highest ones."""
    shapes = [(size, size)]
    if data.shapes_differ:
        shapes += [(size, data.longest), (data.longest, size)]
    for height, width in shapes:
        new_width, new_height = fit_size(width, height, size, data.longest, data.multiple)
        try:
            model.require_grid(new_height, new_width)
        except ValueError as error:
            shape = f"{new_width} x {new_height}"
            raise ConfigError(f"images of {shape} px (size {size}): {error}") from error
