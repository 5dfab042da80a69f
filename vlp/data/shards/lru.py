"""A bounded store that keeps what was used most recently."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LRUCache(Generic[Value]):
    """At most `bound` values by key; the one unused for longest goes first, through `dispose`."""

    def __init__(self, bound: int, dispose: Callable[[Value], object] | None = None) -> None:
        self._bound = bound
        self._dispose = dispose
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the value of `key`, made if missing; an exception of `make` keeps nothing."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = make()
        self._values[key] = value
        if len(self._values) > self._bound:
            _, oldest = self._values.popitem(last=False)
            if self._dispose is not None:
                self._dispose(oldest)
        return value

    def clear(self) -> None:
        """Dispose of every value."""
        while self._values:
            _, value = self._values.popitem()
            if self._dispose is not None:
                self._dispose(value)

    def __len__(self) -> int:
        return len(self._values)
