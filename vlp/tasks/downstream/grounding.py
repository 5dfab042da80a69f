"""Weakly supervised grounding: losses of retrieval on referring expressions, judged by pointing.

Boxes are never shown in training (ACE-RPE, section 4.2, after ALBEF); on the validation data they
tell which model is the best.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from vlp.config import Config, validated
from vlp.data.pretrain.loader import PretrainData
from vlp.models.folder import Loaded
from vlp.tasks.downstream.retrieval import PairsConfig, PairsDataConfig, PairsTask, pairs
from vlp.tasks.plain import Precision

FILE_NAME = "grounding.json"


class MapConfig(Config):
    """How the map of an expression over the patches is made."""

    by: Literal["gradcam", "similarity"] = "gradcam"
    layer: int | None = Field(None, ge=0, description="of Grad-CAM; null: the middle one")
    head: int | None = Field(
        None, ge=1, description="first word pieces that make the map; null: all of an expression"
    )


class GroundingDataConfig(PairsDataConfig):
    """One expression of an image at each visit."""

    captions: Literal["one"] = "one"
    texts: Literal["expressions"] = "expressions"


class GroundingConfig(PairsConfig, MapConfig):
    """How the map of an expression is made on the validation data, too."""

    kind: Literal["grounding"] = "grounding"
    data: GroundingDataConfig


class Grounding(PairsTask):
    """Judged by the pointing game."""

    metric: ClassVar[str] = "pointing"
    settings: GroundingConfig

    def save_model(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write the model folder, and how it was judged."""
        super().save_model(folder, state)
        made = self.settings.model_dump(mode="json", include={*MapConfig.model_fields})
        (folder / FILE_NAME).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


def map_of(folder: Path | None) -> MapConfig:
    """How maps of a model folder's expressions were made when it was chosen, or the defaults.

    Raises:
        ConfigError: its `grounding.json` says something else.
    """
    path = (folder or Path()) / FILE_NAME
    if folder is None or not path.is_file():
        return MapConfig()
    return validated(json.loads(path.read_text(encoding="utf-8")), MapConfig, path)


def build(
    config: GroundingConfig, parts: Loaded, batch: int, seed: int, precision: Precision
) -> tuple[Grounding, PretrainData]:
    """The task and its training data.

    Raises:
        ConfigError: shards, batch and groups cannot be used.
    """
    return Grounding(config, parts, precision), pairs(config, parts, batch, seed)
