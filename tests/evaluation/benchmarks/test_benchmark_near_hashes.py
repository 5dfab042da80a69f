"""The search for near hashes, timed at sizes of which some are planned."""

from __future__ import annotations

import json

import pytest

from data_tools.dedup.near_duplicates import least_cost
from evaluation.benchmarks.data.near_hashes import (
    OwnCost,
    SearchCost,
    main,
    own_table,
    planned,
)


@pytest.mark.integration
def test_the_command(capsys: pytest.CaptureFixture) -> None:
    sizes = ["--hashes", "2000", "20000", "--images", "1000", "60000"]
    assert main([*sizes, "--planned", "1000000000", "--tasks", "2"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[3].startswith("1,000,000,000, planned")
    figures = [json.loads(line) for line in printed if line.startswith("{")]
    assert {one["name"] for one in figures} == {
        f"near_hashes/{count}/{what}"
        for count in (2000, 20000, "own/1000", "own/60000")
        for what in ("time", "memory")
    }
    assert all(one["value"] > 0 for one in figures if one["name"].endswith("time"))


def test_the_process_itself_is_planned_by_a_line() -> None:
    printed = own_table({10: OwnCost(1.0, 10**9), 20: OwnCost(3.0, 2 * 10**9)}, [50])
    assert printed.splitlines()[-1].split() == ["50,", "planned", f"{9e6 / 50:.2f}", "5.00"]


def test_a_plan_grows_with_the_comparisons() -> None:
    plan = planned(10**9, 10**7, SearchCost(84, 280.0, 10**9))
    costs = [least_cost(6, count)[0] for count in (10**7, 10**9)]
    assert plan.seconds == pytest.approx(280 * 100 * costs[1] / costs[0])
    assert plan.tasks == 210 * 64
