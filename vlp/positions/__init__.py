"""Position encodings behind one interface; `create_position(name, **options)` makes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlp.positions.anchor_encoding import AnchorPosition
from vlp.positions.base import PositionContext, PositionEncoding

_ENCODINGS: dict[str, type[PositionEncoding]] = {
    "anchor": AnchorPosition,
    # Uniform is ACE-RPE fed with constant paths (reading A26): the same module, another field.
    "uniform": AnchorPosition,
}

__all__ = ["PositionContext", "PositionEncoding", "create_position", "list_positions"]


def list_positions() -> Sequence[str]:
    """Names that `create_position` knows."""
    return tuple(sorted(_ENCODINGS))


def create_position(name: str, **options: Any) -> PositionEncoding:
    """Make a position encoding by name.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    if name not in _ENCODINGS:
        raise ValueError(
            f"unknown position encoding {name!r}; known: {', '.join(list_positions())}"
        )
    return _ENCODINGS[name](**options)
