"""Truth with a third value, None: what can be read either way (Kleene's strong logic)."""

from __future__ import annotations

from collections.abc import Iterable


def every(values: Iterable[bool | None]) -> bool | None:
    """Whether all hold: one that does not decides, else one that can be read either way."""
    found = set(values)
    return False if False in found else None if None in found else True


def some(values: Iterable[bool | None]) -> bool | None:
    """Whether at least one holds."""
    found = set(values)
    return True if True in found else None if None in found else False
