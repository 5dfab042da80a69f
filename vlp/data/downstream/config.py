"""Configuration of the data of a downstream task."""

from __future__ import annotations

from pydantic import Field

from vlp.data.config import AugmentConfig
from vlp.data.image.ablated_views import View
from vlp.data.stream.map_dataset import MapDatasetConfig


class DownstreamDataConfig(MapDatasetConfig):
    """Shard folders to train on and to choose the best model by."""

    train: tuple[str, ...] = Field(
        min_length=1, description="shard folders to train on", json_schema_extra={"resume": "path"}
    )
    validation: tuple[str, ...] = Field(
        (), description="none: no model is chosen", json_schema_extra={"resume": "tolerated"}
    )
    limit: int | None = Field(None, ge=1, description="only the first so many items of `train`")
    validation_limit: int | None = Field(
        None,
        ge=1,
        description="likewise of `validation`",
        json_schema_extra={"resume": "tolerated"},
    )
    augment: AugmentConfig = Field(AugmentConfig(), description="augmentation of training images")
    view: View = Field(
        "image",
        description="what the model is shown: `shuffled` (patches in random order) and `blank` "
        "tell what it owes to places and to the image",
    )
