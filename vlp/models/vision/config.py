"""Configuration of the timm model and its position encodings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from vlp.config import Config


class PositionConfig(Config):
    """One encoding of `vlp.positions.list_positions()`."""

    name: str
    # Not `on`, as `attach` calls it: YAML 1.1 reads that as true.
    roles: str | None = Field(None, description="letters of q, k, v, where the encoding has them")
    options: Mapping[str, Any] = {}


class BackboneConfig(Config):
    """A timm vision transformer with position encodings attached."""

    name: str = Field(description="of timm, or of vlp.models.vision")
    options: Mapping[str, Any] = Field({}, description="of timm.create_model: depth, ...")
    pretrained: bool = Field(False, description="timm's public weights")
    absolute: Literal["keep", "drop"] = Field("keep", description="the model's own positions")
    positions: tuple[PositionConfig, ...] = ()
