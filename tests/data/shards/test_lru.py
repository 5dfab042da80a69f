from __future__ import annotations

import pytest

from vlp.data.shards.lru import Recent


def test_the_one_unused_for_longest_goes_first() -> None:
    gone: list[str] = []
    recent: Recent[str] = Recent(2, dispose=gone.append)
    recent.get(1, lambda: "a")
    recent.get(2, lambda: "b")
    assert recent.get(1, lambda: "not made again") == "a"
    recent.get(3, lambda: "c")
    assert gone == ["b"]
    assert len(recent) == 2
    recent.clear()
    assert sorted(gone) == ["a", "b", "c"]
    assert len(recent) == 0


def test_a_failure_keeps_nothing() -> None:
    recent: Recent[int] = Recent(2)

    def fail() -> int:
        raise OSError

    with pytest.raises(OSError):
        recent.get(1, fail)
    assert recent.get(1, lambda: 5) == 5
