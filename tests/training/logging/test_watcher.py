"""Ranks that are named, by signs of life with clocks of the test's own."""

from vlp.training.logging.heartbeat import Heartbeat
from vlp.training.logging.pace import Pace, compare
from vlp.training.logging.watcher import Sign, Watcher

FIRST = Sign(1, "node-a", 6, 20, "forward", 0.5, 0.5, waits=True)


def after(sign: Sign, seconds: float, number: int = 2) -> Sign:
    return sign._replace(number=number, seconds=sign.seconds + seconds)


def test_a_rank_without_signs_is_named_once_and_when_it_is_back() -> None:
    watcher = Watcher(range(2), patience=10)
    other = FIRST._replace(host="node-b", moves=19, phase="data", waits=False)
    assert watcher.see([FIRST, other], 0.0) == ([], False)
    assert watcher.see([after(FIRST, 9), other], 9.0) == ([], False)
    said, hangs = watcher.see([after(FIRST, 11, 3), other], 11.0)
    assert said == ["rank 1 (node-b) is silent for 11 s; it was in step 7, data"]
    assert hangs
    assert watcher.see([after(FIRST, 13, 4), other], 13.0) == ([], False)
    back = FIRST._replace(number=2, host="node-b", moves=21)
    assert watcher.see([FIRST._replace(number=5, moves=21), back], 15.0) == (
        ["rank 1 (node-b) is back after 15 s"],
        False,
    )


def test_a_step_that_stands_names_who_is_behind_or_waits_for_nobody() -> None:
    for behind, told in (
        ({"moves": 19, "phase": "data", "waits": False}, "rank 2 (node-a) in data; the others"),
        ({"waits": False}, "rank 2 (node-a) in forward; the others wait"),
        ({}, "rank 0 (node-a), 1 (node-a), 2 (node-a) in forward"),
    ):
        watcher = Watcher(range(3), patience=10)
        signs = [FIRST, FIRST, FIRST._replace(**behind)]
        assert watcher.see(signs, 0.0) == ([], False)
        [said], hangs = watcher.see([after(sign, 11) for sign in signs], 11.0)
        assert hangs
        assert said.startswith("step 7 stands for 12 s: ")
        assert told in said
        assert watcher.see([after(sign, 12, 3) for sign in signs], 12.0) == ([], False)


def test_what_takes_long_as_always_and_a_run_that_ends_are_no_hang() -> None:
    watcher = Watcher(range(2), patience=10)
    slow = FIRST._replace(usual=30.0)
    saving = FIRST._replace(phase="save")
    for signs in ([slow, slow], [saving, saving], [FIRST, None]):
        assert watcher.see([sign and after(sign, 50) for sign in signs], 1.0) == ([], False)
    ended = [Sign.of_end(3), Sign.of_end(3)]
    for now in (2.0, 99.0):
        assert watcher.see(ended, now) == ([], False)


def test_a_straggler_is_named_with_what_it_does() -> None:
    even = Pace(data=1.0, busy=8.0, retries=0)
    assert compare([even, even._replace(busy=8.5)], 10.0)[1] is None
    figures, said = compare([even, even, Pace(data=5.0, busy=12.0, retries=3)], 20.0)
    assert figures == {
        "store_retries": 3,
        "data_wait_share_max": 0.25,
        "slowest_rank": 2,
        "slowest_rank_lag": 0.2,
    }
    assert said == "rank 2 is slow: it waits for data 20% of the time longer than the others"
    said = compare([even._replace(busy=16.0), even], 20.0)[1]
    assert said == "rank 0 is slow: it computes 40% of the time longer than the others"
    assert compare([even], 10.0) == ({"store_retries": 0}, None)


def test_phases_add_up() -> None:
    beat = Heartbeat()
    beat.enter("data")
    for _ in range(3):
        assert beat.enter("forward") >= 0
        beat.enter("data")
    assert beat.moves == 7
    assert set(beat.seconds) == {"start", "data", "forward"}
    assert beat.sign(4)[:5] == (4, beat.sign(4).host, 0, 7, "data")
    assert beat.sign(4).usual == beat.longest["data"]
