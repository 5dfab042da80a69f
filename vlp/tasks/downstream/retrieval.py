"""Retrieval: pretraining's contrastive and matching terms on the pairs of one benchmark.

All captions of a picture are right answers for it, in the batch and in the queue. What it leaves is
a model folder like pretraining's. Weakly supervised grounding trains the same way on referring
expressions (ACE-RPE, section 4.2).
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor

from vlp.config import Config
from vlp.data.config import DataConfig
from vlp.data.inputs import Inputs
from vlp.data.loader import PretrainData
from vlp.models.folder import Loaded, save_pretrained
from vlp.objectives.config import ObjectivesConfig
from vlp.tasks.plain import Precision
from vlp.tasks.pretraining import Pretraining


class RetrievalDataConfig(DataConfig):
    """Pairs to train on, each caption one, and shard folders to choose the best model by."""

    vocabulary: Literal[""] = Field("", description="that of the model which the run starts from")
    captions: Literal["one", "all"] = "all"
    validation: tuple[str, ...] = Field((), description="none: no model is chosen")
    validation_limit: int | None = Field(None, ge=1, description="samples of `validation`")


class RetrievalConfig(Config):
    """Contrastive term, matching, teacher and queue, as in pretraining; nothing is masked."""

    kind: Literal["retrieval"] = "retrieval"
    data: RetrievalDataConfig
    objectives: ObjectivesConfig = ObjectivesConfig(mlm=None, mim=None)
    rerank: int = Field(16, ge=0, description="candidates re-ranked on the validation data")

    @model_validator(mode="after")
    def _nothing_masked(self) -> RetrievalConfig:
        if self.objectives.mlm or self.objectives.mim:
            raise ValueError("retrieval masks nothing: objectives.mlm and .mim stay null")
        return self


class Retrieval(Pretraining):
    """Pretraining's task on a model that is there already.

    Args:
        settings: of the task.
        parts: model, tokenizer and preparation of pictures; the model is taken over.
        precision: "bf16" runs the passes under autocast, "float32" does not.
    """

    kind: ClassVar[str] = "retrieval"
    metric: ClassVar[str] = "mean"

    def __init__(
        self, settings: RetrievalConfig, parts: Loaded, precision: Precision = "float32"
    ) -> None:
        model = parts.model
        super().__init__(model.config, settings.objectives, "", precision, model=model)
        self.settings, self.parts = settings, parts

    def save_model(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write the model folder; `state` is the full `state_dict` of this task."""
        prefix = "model."
        model = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
        save_pretrained(folder, self.config, model, self.parts.text, self.parts.preprocess)


def build(
    config: RetrievalConfig, parts: Loaded, batch: int, seed: int, precision: Precision
) -> tuple[Retrieval, PretrainData]:
    """The task and its training data.

    Raises:
        ConfigError: shards, batch and groups cannot be used.
    """
    image, text = parts.model.config.image, parts.model.config.text
    inputs = Inputs(image.image_size, image.grid, text.max_tokens, text.vocab_size, None, None)
    data = PretrainData(config.data, inputs, batch, seed, parts.text)
    return Retrieval(config, parts, precision), data
