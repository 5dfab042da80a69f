"""Configuration of the timm model and its position encodings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from vlp.config import Config
from vlp.positions.position_config import PositionConfig


class BackboneConfig(Config):
    """A timm vision transformer with position encodings attached."""

    name: str = Field(description="of timm, or of vlp.models.vision")
    options: Mapping[str, Any] = Field({}, description="of timm.create_model: depth, ...")
    pretrained: bool = Field(False, description="timm's public weights")
    absolute: Literal["keep", "drop"] = Field("keep", description="the model's own positions")
    positions: tuple[PositionConfig, ...] = Field(
        (), description="encodings that are attached, none or several"
    )
