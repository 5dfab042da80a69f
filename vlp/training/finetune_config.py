"""A fine-tuning run: where it starts, what it trains, and how it is validated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from vlp.config import Choice, LocalPath
from vlp.tasks.downstream.registry import get_task, task_kinds
from vlp.tasks.downstream.task import TaskConfig
from vlp.training.config import RunConfig, ValidatedTrainingConfig


class FinetuneTrainingConfig(ValidatedTrainingConfig):
    """A fine-tuning, on DDP unless `engine` says otherwise."""

    engine: Literal["ddp", "deepspeed"] = Field(
        "ddp", description=ValidatedTrainingConfig.model_fields["engine"].description
    )
    metric: str | None = Field(
        None,
        description="metric that decides which model is the best, of `loss/...` the lowest value, "
        "of others the highest; null: the task's own",
    )
    patience: int | None = Field(
        None, ge=1, description="validations without a better result after which the run ends"
    )


class FinetuneConfig(RunConfig):
    """Everything a script `launch/finetune.py` needs."""

    output: LocalPath = Field(
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
    training: FinetuneTrainingConfig = Field(
        FinetuneTrainingConfig(),
        description="length, batch, optimiser, validation, checkpoints and logs",
    )
