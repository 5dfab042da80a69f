"""Image generation: the likelihood of images, pixel by pixel (Li et al. 2021, section 4.1)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from vlp.config import Config
from vlp.data.labelled_images import open_labelled
from vlp.data.stream.loader import OrderedData
from vlp.objectives.loss import Loss
from vlp.tasks.pixels.data import PixelBatch, PixelDataConfig, pixel_data
from vlp.tasks.pixels.model import PixelModelConfig, PixelTransformer
from vlp.tasks.task import PlainTask, Precision, StepOutput
from vlp.tasks.vision_only import save_task


class PixelsConfig(Config):
    """Model and images."""

    kind: Literal["pixels"] = Field("pixels", description="selects this class")
    model: PixelModelConfig = Field(
        PixelModelConfig(), description="sizes of the model, and its position encodings"
    )
    data: PixelDataConfig = Field(description="images whose pixels are modelled")


class Pixels(PlainTask):
    """Maximum likelihood of every channel of every pixel given those before it."""

    def __init__(self, config: PixelsConfig, precision: Precision = "float32") -> None:
        super().__init__(precision)
        self.config = config
        self.model = PixelTransformer(config.model, config.data.image_size)

    def forward(self, batch: PixelBatch, step: int) -> StepOutput:
        """The loss in nats a channel, and the same in bits (of this rank's images)."""
        with self.autocast(batch.values.device):
            nats = self.model.nats(batch.values)
        count = torch.tensor(nats.numel(), device=nats.device)
        statistics = {}
        if nats.numel():
            statistics["bits_per_dim"] = nats.detach().mean() / math.log(2)
        return self.step_output({"pixels": Loss(nats.sum(), count)}, statistics=statistics)

    def save_model(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write the model folder."""
        save_task(folder, self.config, state)


def build(
    config: PixelsConfig, batch: int, seed: int, precision: Precision
) -> tuple[Pixels, OrderedData]:
    """The task and its training data."""
    images = open_labelled(config.data.train, config.data.classes)
    open_labelled(config.data.test, config.data.classes)
    data = pixel_data(images, config.data, batch, seed)
    return Pixels(config, precision), data


def load(config: dict[str, Any], known: dict[str, Any]) -> Pixels:
    """The task that a model folder describes, with fresh weights."""
    return Pixels(PixelsConfig.model_validate(config))
