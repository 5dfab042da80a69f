"""The position encodings that a configuration names, for models that are not timm's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlp.config import ConfigError
from vlp.positions import (
    CROSS_MODAL,
    PositionEncoding,
    acts_on_tokens,
    causal_positions,
    create_fitting_position,
    place_roles,
)
from vlp.positions.position_config import PositionConfig


def on_tokens(position: PositionConfig) -> bool:
    """Return whether an encoding acts once on the tokens; else it acts in every layer of attention.

    Raises:
        ConfigError: an unknown name, or an encoding of cross-modal attention.
    """
    try:
        _refuse_cross_modal(position)
        return acts_on_tokens(position.name)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def create_encoding(position: PositionConfig, **sizes: Any) -> PositionEncoding:
    """Return one encoding with those of `sizes` (width, heads, grid) that it has.

    Raises:
        ConfigError: an unknown name, or options or sizes that do not fit it.
    """
    try:
        _refuse_cross_modal(position)
        placed = place_roles(position.name, position.roles, position.options)
        return create_fitting_position(position.name, sizes, **placed)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"position encoding {position.name}: {error}") from error


def attention_encodings(
    positions: Sequence[PositionConfig],
    width: int,
    heads: int,
    grid: tuple[int, int],
    causal: bool = False,
) -> list[PositionEncoding]:
    """Encodings of one layer of self-attention, those of `positions` that act there.

    Args:
        positions: in order; those that act on tokens are left out.
        width: channels of the layer.
        heads: attention heads.
        grid: (rows, columns) of the tokens.
        causal: the layer sees no later tokens; `cope` then counts earlier ones.

    Raises:
        ConfigError: options that do not fit, or with `causal` an encoding that sees later tokens.
    """
    found = []
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
                "tokens, which is no use where they are to be predicted; "
                f"{', '.join(causal_positions())} do not"
            )
        found.append(encoding)
    return found


def _refuse_cross_modal(position: PositionConfig) -> None:
    if position.name in CROSS_MODAL:
        raise ValueError(f"{position.name} lies between an image and a text")
