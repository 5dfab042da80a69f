"""A training run of a vision-only model."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vlp.config import LocalPath
from vlp.tasks.classification.task import ClassificationConfig
from vlp.tasks.detection.task import DetectionConfig
from vlp.tasks.grids.task import GridsConfig
from vlp.tasks.pixels.task import PixelsConfig
from vlp.tasks.widgets.task import WidgetsConfig
from vlp.training.config import RunConfig

AnyTask = ClassificationConfig | DetectionConfig | GridsConfig | PixelsConfig | WidgetsConfig


class VisionConfig(RunConfig):
    """Everything `launch/train_vision.py` needs; `task.kind` says what is trained."""

    output: LocalPath = Field(
        "runs/vision", description="folder of this run", json_schema_extra={"resume": "free"}
    )
    task: Annotated[AnyTask, Field(discriminator="kind")] = Field(
        description="task, selected by its `kind`"
    )
