"""ARC as in ViTARC: one input grid, one output grid, several tasks per model."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch.nn import functional

from vlp.config import Config
from vlp.data.stream.loader import OrderedData, indexed_data
from vlp.objectives.loss import Loss
from vlp.tasks.grids.data import (
    GridBatch,
    GridDataConfig,
    GridSamples,
    collate_grids,
    open_grids,
)
from vlp.tasks.grids.model import GridModelConfig, GridTransformer
from vlp.tasks.task import Precision, StepOutput
from vlp.tasks.vision_only import VisionTask


class GridsConfig(Config):
    """Model and tasks."""

    kind: Literal["grids"] = Field("grids", description="selects this class")
    model: GridModelConfig = Field(GridModelConfig(), description="sizes and position encodings")
    data: GridDataConfig = Field(description="tasks of ARC, and how many samples")


class Grids(VisionTask):
    """Cross-entropy of every cell of the output's template, with border and padding."""

    config_class = GridsConfig

    def __init__(self, config: GridsConfig, precision: Precision = "float32") -> None:
        super().__init__(config, precision)
        self.model = GridTransformer(config.model, config.data.size, len(config.data.tasks))

    def forward(self, batch: GridBatch, step: int) -> StepOutput:
        """Compute the loss in nats per cell, and the shares of right cells and templates."""
        with self.autocast(batch.inputs.device):
            logits = self.model(batch, batch.outputs)
        logits = logits.float().movedim(-1, 1)
        nats = functional.cross_entropy(logits, batch.outputs, reduction="sum")
        count = torch.tensor(batch.outputs.numel(), device=nats.device)
        statistics = {}
        if len(batch.outputs):
            correct = logits.argmax(1) == batch.outputs
            statistics = {"cells": correct.float().mean(), "exact": correct.all(-1).float().mean()}
        return self.step_output({"cells": Loss(nats, count)}, statistics=statistics)


def build(
    config: GridsConfig, batch: int, seed: int, precision: Precision
) -> tuple[Grids, OrderedData]:
    """Build the task and its training data."""
    data = config.data
    samples, collate = GridSamples(open_grids(data), data), partial(collate_grids, data.size)
    return Grids(config, precision), indexed_data(data.samples, samples, collate, data, batch, seed)
