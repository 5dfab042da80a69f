"""Sigmoid form of the contrastive objective (SigLIP): every pair is judged by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from vlp.models.config import ModelConfig
from vlp.objectives.config import ContrastiveConfig, ObjectivesConfig
from vlp.objectives.contrastive.sigmoid import LearnedBias, sigmoid_loss
from vlp.tasks.pretraining.objective import Objective, Step, Term


class SigmoidContrastive(Objective):
    """Tell whether an image and a text belong together, for all pairs of all ranks.

    Inputs: features of the unmasked batch. The model's temperature scales cosines; the paper starts
    it at 0.1. Loss: `contrastive`.
    """

    on_clean_pairs: ClassVar[bool] = True
    trains = frozenset()
    saves_modules: ClassVar[bool] = False
    settings: ContrastiveConfig

    def __init__(self, settings: Any, objectives: ObjectivesConfig, model: ModelConfig) -> None:
        super().__init__(settings, objectives, model)
        self.bias = LearnedBias(settings.bias)

    @classmethod
    def settings_of(cls, name: str, objectives: ObjectivesConfig) -> ContrastiveConfig | None:
        """Return the contrastive objective's settings where its kind is `sigmoid`."""
        contrastive = objectives.contrastive
        return contrastive if contrastive and contrastive.kind == "sigmoid" else None

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the learned bias."""
        return {"sigmoid_bias": self.bias}

    def __call__(self, step: Step) -> dict[str, Term]:
        """Compute the loss over the batch's images."""
        batch = step.batch
        loss = sigmoid_loss(
            step.image.feature,
            step.text.feature,
            batch.image_ids,
            batch.valid,
            step.model.temperature(),
            self.bias(),
        )
        return {"contrastive": Term(loss, self.settings.weight)}
