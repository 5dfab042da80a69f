"""A fine-tuning run: where it starts, what it trains, and how it is validated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from vlp.config import Choice
from vlp.tasks.downstream.registry import get_task, task_kinds
from vlp.tasks.downstream.task import TaskConfig
from vlp.training.config import LoopConfig, RunConfig


class FinetuningConfig(LoopConfig):
    """Training on Accelerate; figures of the validation data choose the model that is kept."""

    evaluate_every: int | None = Field(
        None, ge=1, description="steps between validations; null: every epoch"
    )
    metric: str | None = Field(
        None, description="metric that decides which model is the best; null: the task's own"
    )
    patience: int | None = Field(
        None, ge=1, description="validations without a better result after which the run ends"
    )


class FinetuneConfig(RunConfig):
    """Everything a script `launch/finetune_*.py` needs."""

    output: str = Field(
        "runs/finetune", description="folder of this run", json_schema_extra={"resume": "free"}
    )
    init_from: str = Field(
        description="model folder or hub name that the run starts from",
        json_schema_extra={"resume": "path"},
    )
    model: Mapping[str, Any] = Field(
        {},
        description="changes to the configuration of `init_from`, as {image: {image_size: 384}}",
    )
    task: Annotated[TaskConfig, Choice("kind", task_kinds, lambda kind: get_task(kind).config)] = (
        Field(description="of one of the kinds that `vlp.tasks.downstream.registry` knows")
    )
    training: FinetuningConfig = Field(
        FinetuningConfig(), description="length, batch, optimiser, validation, checkpoints and logs"
    )
