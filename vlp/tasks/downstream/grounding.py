"""Weakly supervised grounding: losses of retrieval on referring expressions, judged by pointing.

Boxes are never shown in training (ACE-RPE, section 4.2, after ALBEF); on the validation data they
tell which model is the best.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from vlp.data.loader import PretrainData
from vlp.models.folder import Loaded
from vlp.tasks.downstream.retrieval import PairsConfig, PairsDataConfig, PairsTask, pairs
from vlp.tasks.plain import Precision


class GroundingDataConfig(PairsDataConfig):
    """One expression of a picture at each visit."""

    captions: Literal["one"] = "one"
    texts: Literal["expressions"] = "expressions"


class GroundingConfig(PairsConfig):
    """How the map of an expression is made on the validation data, too."""

    kind: Literal["grounding"] = "grounding"
    data: GroundingDataConfig
    by: Literal["gradcam", "similarity"] = "gradcam"
    layer: int | None = Field(None, ge=0, description="of Grad-CAM; null: the middle one")
    head: int | None = Field(
        None, ge=1, description="first word pieces that make the map; null: all of an expression"
    )


class Grounding(PairsTask):
    """Judged by the pointing game."""

    metric: ClassVar[str] = "pointing"
    settings: GroundingConfig


def build(
    config: GroundingConfig, parts: Loaded, batch: int, seed: int, precision: Precision
) -> tuple[Grounding, PretrainData]:
    """The task and its training data.

    Raises:
        ConfigError: shards, batch and groups cannot be used.
    """
    return Grounding(config, parts, precision), pairs(config.data, parts, batch, seed)
