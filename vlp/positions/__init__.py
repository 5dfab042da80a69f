"""Position encodings behind one interface; `create_position(name, **options)` makes one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vlp.positions.anchor_encoding import AnchorPosition
from vlp.positions.base import PositionContext, PositionEncoding
from vlp.positions.by_modality import ByModality
from vlp.positions.irpe import RelativePosition
from vlp.positions.learned import LearnedGridPosition, LearnedPosition

_ENCODINGS: dict[str, Callable[..., PositionEncoding]] = {
    "anchor": AnchorPosition,
    "irpe-cross": partial(RelativePosition, "cross"),
    "irpe-euclidean": partial(RelativePosition, "euclidean"),
    "irpe-product": partial(RelativePosition, "product"),
    "irpe-quantization": partial(RelativePosition, "quantization"),
    "learned-1d": LearnedPosition,
    "learned-2d": LearnedGridPosition,
    # Uniform is ACE-RPE fed with constant paths (reading A26): the same module, another field.
    "uniform": AnchorPosition,
}

__all__ = ["ByModality", "PositionContext", "PositionEncoding", "create_position", "list_positions"]


def list_positions() -> Sequence[str]:
    """Names that `create_position` knows."""
    return tuple(sorted(_ENCODINGS))


def create_position(name: str, **options: Any) -> PositionEncoding:
    """Make a position encoding by name.

    Raises:
        ValueError: unknown name, or options that this encoding lacks or misses; the message lists
            the known ones.
    """
    if name not in _ENCODINGS:
        raise ValueError(
            f"unknown position encoding {name!r}; known: {', '.join(list_positions())}"
        )
    make = _ENCODINGS[name]
    signature = inspect.signature(make)
    try:
        signature.bind(**options)
    except TypeError as problem:
        known = ", ".join(signature.parameters)
        raise ValueError(f"position encoding {name!r}: {problem}; options: {known}") from None
    return make(**options)
