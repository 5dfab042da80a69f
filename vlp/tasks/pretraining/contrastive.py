"""Contrastive objective: ITC with a learned temperature, or the anchor loss in the paper's form."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from vlp.models.config import ModelConfig
from vlp.models.vlp import VLPModel
from vlp.objectives.anchor import paper_anchor_loss
from vlp.objectives.config import ContrastiveConfig, ObjectivesConfig
from vlp.objectives.contrastive.itc import itc_loss, positives, soft_targets
from vlp.tasks.pretraining.objective import TOKENS, Objective, Step, Term
from vlp.tasks.pretraining.teacher import gather_keys


class Contrastive(Objective):
    """Match images and captions against the keys of all ranks and the teacher's queue.

    Inputs: features of the unmasked batch; with a teacher, its keys and its soft targets. The
    paper's form (Eqs 1-2) also reads the tokens, and no soft targets. Loss: `contrastive`.
    """

    on_clean_pairs: ClassVar[bool] = True
    settings: ContrastiveConfig

    def __init__(self, settings: Any, objectives: ObjectivesConfig, model: ModelConfig) -> None:
        super().__init__(settings, objectives, model)
        self.trains = TOKENS if settings.is_paper_form else frozenset()

    @classmethod
    def settings_of(cls, name: str, objectives: ObjectivesConfig) -> ContrastiveConfig | None:
        """Return the settings unless their kind is `sigmoid`, an objective of its own."""
        contrastive = objectives.contrastive
        return contrastive if contrastive and contrastive.kind != "sigmoid" else None

    def __call__(self, step: Step) -> dict[str, Term]:
        """Compute the loss over the batch's rows."""
        settings, batch, teacher = self.settings, step.batch, step.teacher
        image, text = step.image.feature, step.text.feature
        keys = teacher.keys if teacher else gather_keys(step.image, step.text, batch)
        positive = positives(batch.image_ids, keys.image_ids)
        if settings.is_paper_form:
            loss = paper_anchor_loss(
                image,
                text,
                keys.image,
                keys.text,
                positive,
                step.image.tokens,
                step.text.tokens,
                batch.word_mask,
                settings.scale,
                settings.margin,
                batch.valid,
                keys.valid,
            )
            return {"contrastive": Term(loss, settings.weight)}
        soft = None
        if teacher and teacher.alpha > 0:
            soft = soft_targets(
                teacher.image.feature,
                teacher.text.feature,
                keys.image,
                keys.text,
                pair_temperature(step.model, self.objectives),
                keys.valid,
            )
        loss = itc_loss(
            image,
            text,
            keys.image,
            keys.text,
            positive,
            step.model.temperature(),
            batch.valid,
            keys.valid,
            soft,
            teacher.alpha if teacher else 0.0,
        )
        return {"contrastive": Term(loss, settings.weight)}


def pair_temperature(model: VLPModel, objectives: ObjectivesConfig) -> Tensor | float:
    """Return the temperature of pair similarities; 1 / lambda where the loss learns none."""
    contrastive = objectives.contrastive
    if contrastive and contrastive.is_paper_form:
        return 1 / contrastive.scale
    return model.temperature().detach()
