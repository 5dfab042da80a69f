import time

from vlp.training.watchdog import HangDetector, Heartbeat, Watchdog

FIRST = Heartbeat(1, "node-a", 6, 20, "forward", 0.5, False, is_waiting=True)


def after(sign, seconds, number=2):
    return sign._replace(number=number, seconds=sign.seconds + seconds, is_hanging=seconds > 10)


def test_a_rank_without_signs_is_named_once_and_when_it_is_back():
    detector = HangDetector(10)
    other = FIRST._replace(host="node-b", phase_count=19, phase="data", is_waiting=False)
    assert detector.update([FIRST, other], 0.0) == ([], False)
    assert detector.update([after(FIRST, 9), other], 9.0) == ([], False)
    said, hangs = detector.update([after(FIRST, 11, 3), other], 11.0)
    assert said == ["rank 1 (node-b) is silent for 11 s; it was in step 7, data"]
    assert hangs
    assert detector.update([after(FIRST, 13, 4), other], 13.0) == ([], False)
    back = FIRST._replace(number=2, host="node-b", phase_count=21)
    said, hangs = detector.update([FIRST._replace(number=5, phase_count=21), back], 15.0)
    assert (said, hangs) == (["rank 1 (node-b) is back after 15 s"], False)


def test_a_step_that_stands_names_who_is_behind_or_waits_for_nobody():
    for behind, told in (
        ({"phase_count": 19, "phase": "data", "is_waiting": False}, "rank 2 (node-a) in data; t"),
        ({"is_waiting": False}, "rank 2 (node-a) in forward; the others wait"),
        ({}, "rank 0 (node-a), 1 (node-a), 2 (node-a) in forward"),
    ):
        detector = HangDetector(10)
        signs = [FIRST, FIRST, FIRST._replace(**behind)]
        assert detector.update(signs, 0.0) == ([], False)
        [said], hangs = detector.update([after(sign, 11) for sign in signs], 11.0)
        assert hangs
        assert said.startswith("step 7 hangs for 12 s: ")
        assert told in said
        assert detector.update([after(sign, 12, 3) for sign in signs], 12.0) == ([], False)


def test_a_step_that_goes_on_somewhere_and_a_run_that_ends_are_no_hang():
    detector = HangDetector(10)
    for signs in ([after(FIRST, 50), FIRST], []):
        assert detector.update(signs, 1.0) == ([], False)
    ended = [FIRST._replace(number=3, phase="end")] * 2
    for now in (2.0, 99.0):
        assert detector.update(ended, now) == ([], False)


def test_phases_are_counted_with_their_longest_time(tmp_path):
    watchdog = Watchdog(30.0, print, tmp_path)
    for phase in ("data", "forward", "data"):
        watchdog.enter(phase)
    [sign] = watchdog._exchange(None, 4)
    assert (sign.number, sign.step, *sign[3:5], sign.is_waiting) == (4, 0, 3, "data", False)
    watchdog._phase_start -= 50
    assert watchdog._exchange(None, 5)[0].is_hanging
    watchdog._longest["data"] = 20.0  # it always takes long
    assert not watchdog._exchange(None, 6)[0].is_hanging
    watchdog._phase = "save"
    watchdog._phase_start -= 500
    assert not watchdog._exchange(None, 7)[0].is_hanging


def test_a_hang_of_one_rank_is_said_and_its_stacks_are_written(tmp_path):
    said = []
    with Watchdog(1.0, said.append, tmp_path / "hang") as watchdog:
        watchdog.step = 6
        watchdog.enter("forward")
        end = time.monotonic() + 20
        while len(said) < 2:
            assert time.monotonic() < end
            time.sleep(0.05)
    assert said[0].startswith("step 7 hangs for 1 s: rank 0 (")
    stacks = (tmp_path / "hang" / "step_6" / "rank_0.txt").read_text()
    assert "test_a_hang_of_one_rank" in stacks
