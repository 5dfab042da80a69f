"""Image generation: the likelihood of images, channel by channel (Li et al. 2021, section 4.1)."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from pydantic import Field

from vlp.config import Config
from vlp.data.labelled_images import draw_subset, open_labelled
from vlp.data.stream.loader import OrderedData, indexed_data
from vlp.objectives.loss import Loss
from vlp.tasks.pixels.data import PixelBatch, PixelDataConfig, PixelSamples, collate_pixels
from vlp.tasks.pixels.model import PixelModelConfig, PixelTransformer
from vlp.tasks.task import Precision, StepOutput
from vlp.tasks.vision_only import VisionTask


class PixelsConfig(Config):
    """Model and images."""

    kind: Literal["pixels"] = Field("pixels", description="selects this class")
    model: PixelModelConfig = Field(PixelModelConfig(), description="sizes and position encodings")
    data: PixelDataConfig = Field(description="training and test images")


class Pixels(VisionTask):
    """Negative log-likelihood of every value given all values before it."""

    config_class = PixelsConfig

    def __init__(self, config: PixelsConfig, precision: Precision = "float32") -> None:
        super().__init__(config, precision)
        self.model = PixelTransformer(config.model, config.data.image_size)

    def forward(self, batch: PixelBatch, step: int) -> StepOutput:
        """Compute the loss in nats per value, and in bits for this rank's images."""
        with self.autocast(batch.values.device):
            nats = self.model.nats(batch.values)
        count = torch.tensor(nats.numel(), device=nats.device)
        statistics = {}
        if nats.numel():
            statistics["bits_per_dim"] = nats.detach().mean() / math.log(2)
        return self.step_output({"pixels": Loss(nats.sum(), count)}, statistics=statistics)


def build(
    config: PixelsConfig, batch: int, seed: int, precision: Precision
) -> tuple[Pixels, OrderedData]:
    """Build the task and its training data."""
    data = config.data
    images = draw_subset(open_labelled(data.train, data.classes), data.limit, data.train)
    open_labelled(data.test, data.classes)  # so that its errors come before training
    samples, collate = PixelSamples(images, data), partial(collate_pixels, data.image_size)
    return Pixels(config, precision), indexed_data(len(images), samples, collate, data, batch, seed)
