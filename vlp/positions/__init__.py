"""Position encodings behind one interface; `create_position(name, **options)` makes one."""

from __future__ import annotations

from vlp.positions.attach import attach, drop_absolute
from vlp.positions.base import PositionContext, PositionEncoding
from vlp.positions.by_modality import ByModality
from vlp.positions.registry import (
    CROSS_MODAL,
    acts_on_tokens,
    create_fitting_position,
    create_position,
    list_positions,
    place_roles,
    position_options,
)

__all__ = [
    "CROSS_MODAL",
    "ByModality",
    "PositionContext",
    "PositionEncoding",
    "acts_on_tokens",
    "attach",
    "create_fitting_position",
    "create_position",
    "drop_absolute",
    "list_positions",
    "place_roles",
    "position_options",
]
