"""Eqs 1-2 of ACE-RPE as a loss beside ITC: `objectives: {printed: {weight: 1, scale: 2}}`."""

from __future__ import annotations

from pydantic import Field

from vlp.config import Config
from vlp.objectives.anchor import paper_anchor_loss
from vlp.objectives.contrastive import positives
from vlp.tasks.pretraining import Objective, Step, Term, register_objective
from vlp.tasks.pretraining.objectives import PAPER_MARGIN, TOKENS
from vlp.tasks.teacher import gather_keys


class PrintedConfig(Config):
    """Settings under `objectives.printed`."""

    weight: float = Field(1.0, ge=0)
    scale: float = Field(2.0, gt=0, description="lambda of Eqs 1-2")


class Printed(Objective):
    """The anchor loss as the paper prints it. Loss: `printed`."""

    on_clean_pairs = True
    trains = TOKENS
    settings: PrintedConfig

    def __call__(self, step: Step) -> dict[str, Term]:
        batch, settings = step.batch, self.settings
        keys = step.teacher.keys if step.teacher else gather_keys(step.image, step.text, batch)
        loss = paper_anchor_loss(
            step.image.feature,
            step.text.feature,
            keys.image,
            keys.text,
            positives(batch.pair_ids, keys.image_ids),
            step.image.tokens,
            step.text.tokens,
            batch.word_mask,
            settings.scale,
            PAPER_MARGIN,
            batch.valid,
            keys.valid,
        )
        return {"printed": Term(loss, settings.weight)}


register_objective("printed", Printed, PrintedConfig)
