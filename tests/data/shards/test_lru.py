from __future__ import annotations

import pytest

from vlp.data.shards.lru import LRUCache


def test_the_one_unused_for_longest_goes_first() -> None:
    gone: list[str] = []
    cache: LRUCache[str] = LRUCache(2, dispose=gone.append)
    cache.get(1, lambda: "a")
    cache.get(2, lambda: "b")
    assert cache.get(1, lambda: "not made again") == "a"
    cache.get(3, lambda: "c")
    assert gone == ["b"]
    assert len(cache) == 2
    cache.clear()
    assert sorted(gone) == ["a", "b", "c"]
    assert len(cache) == 0


def test_a_failure_keeps_nothing() -> None:
    cache: LRUCache[int] = LRUCache(2)

    def fail() -> int:
        raise OSError

    with pytest.raises(OSError):
        cache.get(1, fail)
    assert cache.get(1, lambda: 5) == 5
