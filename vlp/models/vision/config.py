"""Configuration of the timm model and its position encodings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from vlp.config import Config


class PositionConfig(Config):
    """One encoding of `vlp.positions.list_positions()`."""

    name: str = Field(description="of one encoding in vlp.positions.list_positions()")
    # Not `on`, as `attach` calls it: YAML 1.1 reads that as true.
    roles: str | None = Field(None, description="letters of q, k, v, where the encoding has them")
    options: Mapping[str, Any] = Field({}, description="of the encoding, as in {theta: 10}")


class BackboneConfig(Config):
    """A timm vision transformer with position encodings attached."""

    name: str = Field(description="of timm, or of vlp.models.vision")
    options: Mapping[str, Any] = Field({}, description="of timm.create_model: depth, ...")
    pretrained: bool = Field(False, description="timm's public weights")
    absolute: Literal["keep", "drop"] = Field("keep", description="the model's own positions")
    positions: tuple[PositionConfig, ...] = Field(
        (), description="encodings that are attached, none or several"
    )
