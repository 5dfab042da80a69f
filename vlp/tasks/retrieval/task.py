"""Retrieval: pretraining's contrastive and ITM objectives on the pairs of one benchmark.

All captions of an image are its positives, in the batch and in the queue.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor

from vlp import distributed
from vlp.data.config import DataConfig
from vlp.data.pretrain import PretrainData
from vlp.data.stream.batch import Inputs
from vlp.data.stream.sampler import require_equal_streams
from vlp.models.folder import Loaded, require_frozen_tower, save_pretrained
from vlp.objectives.config import ObjectivesConfig
from vlp.objectives.loss import require_whole_groups
from vlp.tasks.downstream.registry import DownstreamTask, TaskCard, register_task
from vlp.tasks.downstream.task import TaskConfig, has_task
from vlp.tasks.pretraining import Pretraining
from vlp.tasks.task import Precision, strip_prefix


class PairsDataConfig(DataConfig):
    """Pairs to train on, and shard folders to validate on."""

    vocabulary: Literal[""] = Field(
        "",
        description="stays empty: the tokenizer is that of `init_from`",
        json_schema_extra={"resume": "path"},
    )
    captions: Literal["one", "all"] = Field(
        "all",
        description="one: a caption of each sample, drawn at each visit; all: a pair per caption",
    )
    validation: tuple[str, ...] = Field(
        (), description="shard folders to validate on", json_schema_extra={"resume": "tolerated"}
    )
    validation_limit: int | None = Field(
        None,
        ge=1,
        description="number of first samples of `validation` (in grounding, of expressions)",
        json_schema_extra={"resume": "tolerated"},
    )


class PairsConfig(TaskConfig):
    """Objectives, teacher and queue as in pretraining, without masking."""

    data: PairsDataConfig = Field(description="pairs to train on, and shards to validate on")
    objectives: ObjectivesConfig = Field(
        ObjectivesConfig(mlm=None, mim=None),
        description="objectives and their weights, as in pretraining",
    )

    @model_validator(mode="after")
    def _require_no_masking(self) -> PairsConfig:
        if self.objectives.mlm or self.objectives.mim:
            raise ValueError(f"{self.kind} masks nothing: leave objectives.mlm and .mim null")
        return self


class RetrievalConfig(PairsConfig):
    """Settings of training, and of re-ranking in validation."""

    kind: Literal["retrieval"] = Field("retrieval", description="selects this class")
    rerank: int = Field(16, ge=0, description="candidates re-ranked on the validation data")


class PairsTask(Pretraining):
    """Base of tasks that train a loaded model by pretraining's objectives."""

    metric: ClassVar[str]

    def __init__(
        self, settings: PairsConfig, parts: Loaded, precision: Precision = "float32"
    ) -> None:
        model = parts.model
        super().__init__(model.config, settings.objectives, "", precision, model=model)
        self.settings, self.parts = settings, parts

    @property
    def kind(self) -> str:
        """Return the kind of task in the registry."""
        return self.settings.kind

    @property
    def loaded(self) -> Loaded:
        """Return the model in training with its tokenizer and preprocessing, for evaluation."""
        return self.parts._replace(model=self.model)

    def save_model(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write the model folder; `state` is the full `state_dict` of this task."""
        # Keep pretraining's heads for later fine-tuning; a task's head needs its `task.json`.
        init_folder = self.parts.folder
        heads = {} if init_folder is None or has_task(init_folder) else self.parts.heads
        model = strip_prefix(state, "model.")
        save_pretrained(folder, self.config, model, self.parts.text, self.parts.preprocess, heads)


class Retrieval(PairsTask):
    """Image-text retrieval; the mean of all recalls chooses the best model."""

    metric: ClassVar[str] = "mean"
    settings: RetrievalConfig


def pair_data(config: PairsConfig, parts: Loaded, batch: int, seed: int) -> PretrainData:
    """Return the training batches of a model, without masking."""
    require_equal_streams(batch, config.data.canonical_streams, "task.data")
    require_whole_groups(
        config.objectives, batch, distributed.world_size(), prefix="task.objectives"
    )
    image, text = parts.model.config.image, parts.model.config.text
    statistics = parts.preprocess.mean, parts.preprocess.std
    inputs = Inputs(
        image.image_size, image.grid, text.max_tokens, text.vocab_size, statistics=statistics
    )
    data = PretrainData(config.data, inputs, batch, seed, parts.text)
    require_frozen_tower(data.features, parts.model)
    return data


def build(
    config: RetrievalConfig, parts: Loaded, batch: int, seed: int, precision: Precision
) -> tuple[Retrieval, PretrainData]:
    """Build the task and its training data."""
    return Retrieval(config, parts, precision), pair_data(config, parts, batch, seed)


register_task(
    DownstreamTask("retrieval", RetrievalConfig, build, None, TaskCard("image-text retrieval"))
)
