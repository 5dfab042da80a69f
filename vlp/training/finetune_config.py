"""A fine-tuning run: where it starts, what it trains, and what it is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from vlp.tasks.downstream.caption import CaptionConfig
from vlp.tasks.downstream.grounding import GroundingConfig
from vlp.tasks.downstream.pair_classification import (
    Nlvr2AssignmentConfig,
    Nlvr2Config,
    SnliVeConfig,
)
from vlp.tasks.downstream.retrieval import RetrievalConfig
from vlp.tasks.downstream.vqa import VqaConfig
from vlp.training.config import LoopConfig, RunConfig

AnyDownstream = (
    RetrievalConfig
    | GroundingConfig
    | SnliVeConfig
    | Nlvr2Config
    | Nlvr2AssignmentConfig
    | VqaConfig
    | CaptionConfig
)


class FinetuningConfig(LoopConfig):
    """Training on Accelerate; figures of the validation data choose the model that is kept."""

    evaluate_every: int | None = Field(
        None, ge=1, description="steps between looks at the validation data; null: every epoch"
    )
    metric: str | None = Field(
        None, description="figure that decides which model is the best; null: the task's own"
    )
    patience: int | None = Field(
        None, ge=1, description="looks without a better figure after which the run ends"
    )


class FinetuneConfig(RunConfig):
    """Everything a script `launch/finetune_*.py` needs."""

    output: str = Field("runs/finetune", description="folder of this run")
    init_from: str = Field(description="model folder or hub name that the run starts from")
    model: Mapping[str, Any] = Field(
        {},
        description="changes to the configuration of `init_from`, as {image: {image_size: 384}}",
    )
    task: Annotated[AnyDownstream, Field(discriminator="kind")]
    training: FinetuningConfig = FinetuningConfig()
