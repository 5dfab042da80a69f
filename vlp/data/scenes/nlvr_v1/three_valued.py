"""Truth with a third value, None: what can be read either way (Kleene's strong logic)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


def every(values: Iterable[bool | None]) -> bool | None:
    """Return whether all hold: False decides, then None."""
    found = set(values)
    return False if False in found else None if None in found else True


def some(values: Iterable[bool | None]) -> bool | None:
    """Return whether at least one holds: True decides, then None."""
    found = set(values)
    return True if True in found else None if None in found else False


def quantified(holds: Callable[[int], bool | None], values: Sequence[bool | None]) -> bool | None:
    """Return whether `holds` of the number of true values, if all readings of None agree."""
    sure = values.count(True)
    readings = {holds(sure + more) for more in range(1 + values.count(None))}
    return readings.pop() if len(readings) == 1 else None


def the_only(values: Iterable[bool | None]) -> bool | None:
    """Return the value if there is just one."""
    found = list(values)
    return found[0] if len(found) == 1 else None
