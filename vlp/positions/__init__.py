"""Position encodings behind one interface; `create_position(name, **options)` makes one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vlp.positions.base import ByModality, PositionContext, PositionEncoding
from vlp.positions.registry import (
    CROSS_MODAL,
    acts_on_tokens,
    causal_positions,
    create_fitting_position,
    create_position,
    describe_options,
    list_positions,
    position_class,
    position_options,
    register_position,
    with_roles,
)

if TYPE_CHECKING:
    from vlp.layers.attach import attach, drop_absolute

__all__ = [
    "CROSS_MODAL",
    "ByModality",
    "PositionContext",
    "PositionEncoding",
    "acts_on_tokens",
    "attach",
    "causal_positions",
    "create_fitting_position",
    "create_position",
    "describe_options",
    "drop_absolute",
    "list_positions",
    "position_class",
    "position_options",
    "register_position",
    "with_roles",
]


def __getattr__(name: str) -> Any:
    """Import `attach` and `drop_absolute` on first use: their module builds on this package."""
    if name in ("attach", "drop_absolute"):
        return getattr(importlib.import_module("vlp.layers.attach"), name)
    raise AttributeError(f"module 'vlp.positions' has no attribute {name!r}")
