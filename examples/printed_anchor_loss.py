"""Eqs 1-2 of ACE-RPE as a loss beside ITC: `objectives: {printed: {weight: 1, scale: 2}}`."""

from __future__ import annotations

from typing import Literal

from vlp.objectives.config import ContrastiveConfig, ObjectivesConfig
from vlp.tasks.pretraining import Step, Term, register_objective
from vlp.tasks.pretraining.objectives import Contrastive


class PrintedConfig(ContrastiveConfig):
    """Settings under `objectives.printed`."""

    kind: Literal["paper"] = "paper"


class Printed(Contrastive):
    """The anchor loss as the paper prints it. Loss: `printed`."""

    @classmethod
    def settings_of(cls, name: str, objectives: ObjectivesConfig) -> ContrastiveConfig | None:
        return getattr(objectives, name, None)

    def __call__(self, step: Step) -> dict[str, Term]:
        return {"printed": super().__call__(step)["contrastive"]}


register_objective("printed", Printed, PrintedConfig)
