"""What differs between the configuration of a checkpoint and the one at hand."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

# A run may be moved, sped up, prolonged or judged otherwise; what it trains, on what, and in which
# order may not change. Batch and rank count are free: the data position is a number of samples.
_FREE = re.compile(
    r"output|(task\.)?data\.(workers|cache(\..*)?|max_skipped_share)|training\.(log_every|keep_last)"
)
_TOLERATED = re.compile(r"task\.data\.(test|validation.*)|training\.(?!seed$).*")
_PLACES = re.compile(r"init_from|(task\.)?data\.(sources\.\d+\.path|vocabulary|train(\.\d+)?)")


class Differences(NamedTuple):
    """Lines 'key: saved X, now Y', apart for what forbids resuming and what deserves a warning."""

    fatal: list[str]
    tolerated: list[str]


def compare(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Differences:
    """Compare two configurations as JSON values, key by dotted key."""
    before, now = dict(_leaves(saved)), dict(_leaves(current))
    differences = Differences([], [])
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key, "absent"), now.get(key, "absent")
        if old == new or _FREE.fullmatch(key):
            continue
        # A folder elsewhere may hold the same; another number of folders, or of samples, does not.
        moved = isinstance(before.get(key), str) and isinstance(now.get(key), str)
        tolerated = _TOLERATED.fullmatch(key) or (moved and _PLACES.fullmatch(key))
        chosen = differences.tolerated if tolerated else differences.fatal
        chosen.append(f"{key}: saved {old!r}, now {new!r}")
    return differences


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    items: Iterator[tuple[Any, Any]]
    if isinstance(value, Mapping) and value:
        items = iter(value.items())
    elif isinstance(value, list) and value:
        items = enumerate(value)
    else:
        yield prefix, value
        return
    for key, inner in items:
        yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
