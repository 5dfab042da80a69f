"""Ranks that stop together without asking each other at every step."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import ranks

SCRIPT = Path(__file__).with_name("together_ranks.py")


@pytest.mark.distributed
def test_a_step_has_no_collective_call_but_the_engine_s(tmp_path: Path) -> None:
    """Gradients and the map of unused parameters; a look at the others after 1, 2, 4, 8 steps."""
    results = ranks.finish(ranks.start([SCRIPT, tmp_path / "run"], 2))
    assert [code for code, _ in results] == [0, 0], results
    first, second = (json.loads(output.splitlines()[-1]) for _, output in results)
    assert first == second
    engine, look = {"gloo:all_reduce 0": 2}, {"gloo:all_reduce 1": 1}
    _, *steps = first["calls"]  # the first one holds the start
    looked = [number for number, calls in enumerate(steps, 1) if calls != engine]
    assert all(steps[number - 1] == engine | look for number in looked)
    gaps = [later - earlier for earlier, later in pairwise([0, *looked])]
    assert gaps[:2] == [2, 4]
    assert all(gap <= 2 * before for before, gap in pairwise(gaps))
    assert len(looked) < len(steps) / 4
    # Asked during step 20, ended at the next look.
    assert first["ended"] == "stopped"
    assert 20 < first["step"] < 60
