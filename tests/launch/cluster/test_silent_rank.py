"""A rank of two is stopped while it trains: the other one's log names it, within seconds."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import pytest
import ranks
from launch_lab import Lab

COMMAND = ranks.ROOT / "launch" / "pretrain.py"


def until(rank: ranks.Rank, true: Callable[[str], object], seconds: float) -> float:
    """Wait for what a rank says; returns how long it took."""
    began = time.monotonic()
    while not true(rank.output.read_text(errors="replace")):
        assert time.monotonic() - began < seconds, rank.output.read_text(errors="replace")
        time.sleep(0.1)
    return time.monotonic() - began


@pytest.mark.nightly
def test_a_stopped_rank_is_named_and_the_others_say_where_they_wait(lab: Lab) -> None:
    more = ("training.steps=100000", "training.engine=ddp")
    started = ranks.start([COMMAND, *lab.arguments("silent", *more)], 2)
    first, second = started
    pid = [rank.process.pid or 0 for rank in started]
    log, hang = lab.output("silent") / "log.jsonl", lab.output("silent") / "hang"
    try:
        until(first, lambda _: log.exists() and len(log.read_text().splitlines()) > 3, 120)
        os.kill(pid[1], signal.SIGSTOP)
        named = re.compile(r"rank 1 \(\S+\) is silent for (\d+) s; it was in step \d+, \w+")
        until(first, named.search, 120)
        until(first, lambda _: any(hang.glob("*/rank_0.txt")), 60)
        [stacks] = hang.glob("*/rank_0.txt")
        until(first, lambda _: "last collective calls" in stacks.read_text(), 60)
        assert "vlp/training/loop.py" in stacks.read_text()
        assert "gloo:all_gather" in stacks.read_text()
        os.kill(pid[1], signal.SIGCONT)
        until(first, re.compile(r"rank 1 \(\S+\) is back after \d+ s").search, 60)
        until(second, lambda _: stacks.with_name("rank_1.txt").exists(), 60)

        # The store is rank 0's own here.
        os.kill(pid[0], signal.SIGSTOP)
        until(second, lambda said: "the store of the ranks, at rank 0" in said, 120)
        os.kill(pid[0], signal.SIGCONT)
        lines = len(log.read_text().splitlines())
        until(first, lambda _: len(log.read_text().splitlines()) > lines + 2, 60)
        os.kill(pid[0], signal.SIGTERM)
        assert [code for code, _ in ranks.finish(started, 60)] == [75, 75]
        assert lab.report("silent")["ended"] == "stopped"
    finally:
        for rank in started:
            rank.process.kill()
