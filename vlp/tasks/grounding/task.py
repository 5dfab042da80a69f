"""Weakly supervised visual grounding: the losses of retrieval on referring expressions.

Training sees no boxes (ACE-RPE, section 4.2, after ALBEF).
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor

from vlp.config import Config, validate
from vlp.data.pretrain import PretrainData
from vlp.io import parse_json, write_json
from vlp.models.folder import Loaded
from vlp.tasks.downstream.registry import DownstreamTask, TaskCard, register_task
from vlp.tasks.retrieval.task import PairsConfig, PairsDataConfig, PairsTask, pair_data
from vlp.tasks.task import Precision

FILE_NAME = "grounding.json"


class MapConfig(Config):
    """Settings of the heat map of an expression over the patches."""

    by: Literal["gradcam", "similarity"] = Field(
        "gradcam",
        description="gradcam: gradients of the ITM score in cross-attention; similarity: cosines "
        "of word pieces and patches",
    )
    layer: int | None = Field(
        None, ge=0, description="layer of the cross-modal encoder for Grad-CAM; null: the middle"
    )
    head: int | None = Field(
        None, ge=1, description="number of first word pieces that make the map; null: all"
    )


class GroundingDataConfig(PairsDataConfig):
    """Referring expressions with their images."""

    captions: Literal["one"] = Field("one", description="one expression of an image at each visit")
    texts: Literal["expressions"] = Field(
        "expressions", description="referring expressions take the place of captions"
    )


class GroundingConfig(PairsConfig, MapConfig):
    """Settings of training, and of the heat map in validation."""

    kind: Literal["grounding"] = Field("grounding", description="selects this class")
    data: GroundingDataConfig = Field(
        description="referring expressions to train on, and shards to validate on"
    )

    @model_validator(mode="after")
    def _require_layer_of_gradcam(self) -> GroundingConfig:
        if self.by == "similarity" and self.layer is not None:
            raise ValueError("layer is only for `by: gradcam`; leave it out with `by: similarity`")
        return self


class Grounding(PairsTask):
    """Visual grounding; pointing accuracy chooses the best model."""

    metric: ClassVar[str] = "pointing"
    settings: GroundingConfig

    def save_model(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write the model folder, with the heat map's settings by which the model was chosen."""
        super().save_model(folder, state)
        map_config = self.settings.model_dump(mode="json", include={*MapConfig.model_fields})
        write_json(folder / FILE_NAME, map_config)


def read_map_config(folder: Path | None) -> MapConfig:
    """Read the heat map's settings that `Grounding.save_model` wrote, else return the defaults."""
    path = (folder or Path()) / FILE_NAME
    if folder is None or not path.is_file():
        return MapConfig()
    return validate(parse_json(path.read_text(encoding="utf-8")), MapConfig, path)


def build(
    config: GroundingConfig, parts: Loaded, batch: int, seed: int, precision: Precision
) -> tuple[Grounding, PretrainData]:
    """Build the task and its training data."""
    return Grounding(config, parts, precision), pair_data(config, parts, batch, seed)


_CARD = TaskCard("weakly supervised visual grounding")
register_task(DownstreamTask("grounding", GroundingConfig, build, None, _CARD))
