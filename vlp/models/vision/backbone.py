"""timm models with position encodings, and encodings for models of this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import timm
from pydantic import Field
from torch import nn

from vlp.config import Config, ConfigError
from vlp.io import check_hub
from vlp.positions import (
    CROSS_MODAL,
    PositionEncoding,
    acts_on_tokens,
    attach,
    causal_positions,
    create_fitting_position,
    drop_absolute,
    with_roles,
)
from vlp.positions.options import PositionConfig


class BackboneConfig(Config):
    """A timm vision transformer with position encodings attached."""

    name: str = Field(description="model name of timm or of vlp.models.vision")
    options: Mapping[str, Any] = Field({}, description="options of timm.create_model: depth, ...")
    pretrained: bool = Field(False, description="load timm's public weights")
    absolute: Literal["keep", "drop"] = Field("keep", description="the model's absolute positions")
    positions: tuple[PositionConfig, ...] = Field((), description="encodings to attach")


def create_backbone(config: BackboneConfig, **options: object) -> nn.Module:
    """Create a timm model with its encodings; `config.options` take precedence over `options`."""
    import vlp.models.vision  # noqa: F401  # registers `vlp_*` names with timm

    if config.pretrained:
        check_hub()
    try:
        model: nn.Module = timm.create_model(
            config.name, pretrained=config.pretrained, **{**options, **config.options}
        )
        absolute = config.absolute
        for position in config.positions:
            attach(model, position.name, position.roles, absolute, **position.options)
            # The first call drops the absolute positions.
            absolute = "keep"
        if config.absolute == "drop" and not config.positions:
            drop_absolute(model)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"model {config.name}: {error}") from error
    return model


def on_tokens(position: PositionConfig) -> bool:
    """Return whether an encoding acts once on the tokens, not in every attention layer."""
    try:
        _refuse_cross_modal(position)
        return acts_on_tokens(position.name)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def create_encoding(position: PositionConfig, **sizes: Any) -> PositionEncoding:
    """Create one encoding with those of `sizes` (width, heads, ...) that are its options."""
    try:
        _refuse_cross_modal(position)
        options = with_roles(position.name, position.roles, position.options)
        return create_fitting_position(position.name, sizes, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"position encoding {position.name}: {error}") from error


def attention_encodings(
    positions: Sequence[PositionConfig],
    width: int,
    heads: int,
    grid: tuple[int, int],
    causal: bool = False,
) -> list[PositionEncoding]:
    """Create those encodings in `positions` that act in a self-attention layer, in order.

    grid: (rows, columns) of the tokens. causal: tokens attend to earlier tokens only.
    """
    encodings = []
    for position in positions:
        if on_tokens(position):
            continue
        sizes = {"width": width, "heads": heads, "grid": grid}
        if causal:
            sizes["causal"] = True
        encoding = create_encoding(position, **sizes)
        if causal and not encoding.causal:
            raise ConfigError(
                f"position encoding {position.name} with {dict(position.options)} sees later "
                "tokens, which the model predicts; choose among "
                f"{', '.join(causal_positions())}"
            )
        encodings.append(encoding)
    return encodings


def _refuse_cross_modal(position: PositionConfig) -> None:
    if position.name in CROSS_MODAL:
        raise ValueError(f"{position.name} acts between an image and a text")
