"""Calls and bytes of the collectives of a step: traced on every engine, and as plans have them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ranks

SCRIPT = Path(__file__).with_name("collective_ranks.py")
ROWS = 4
CALLS = {
    "ddp": {"all_reduce": 2, "all_gather": 0, "reduce_scatter": 0},
    "ddp-bf16": {"all_reduce": 2, "all_gather": 0, "reduce_scatter": 0},
    "zero0": {"all_reduce": 1, "all_gather": 0, "reduce_scatter": 0},
    "zero1": {"all_reduce": 3, "all_gather": 2, "reduce_scatter": 0},
    "zero3": {"all_reduce": 2, "all_gather": 140, "reduce_scatter": 1},
}
"""Calls that an engine adds to those of the tiny task, on any number of ranks."""
# The task's own: counts of 7 losses and a histogram of 4,000 places, both int64; of each pair two
# keys of 8 float32, an id and a mark.
OWN_REDUCED, OWN_ROW = (2, 8 * (7 + 4000)), 2 * 8 * 4 + 8 + 8


def checked(said: str, world: int) -> set[str]:
    """Hold each engine's trace against its pinned calls and the predicted ones; return engines."""
    found = [json.loads(line) for line in said.splitlines() if line.startswith('{"engine"')]
    for one in found:
        own = {
            "all_reduce": OWN_REDUCED,
            "all_gather": (2, world * ROWS * OWN_ROW),
            "reduce_scatter": (0, 0),
        }
        for kind, (calls, size) in one["traced"].items():
            calls, size = calls - own[kind][0], size - own[kind][1]
            assert calls == CALLS[one["engine"]][kind], (one["engine"], kind)
            predicted, bytes_ = one["engines"][kind]
            # ZeRO-3 fetches as its own trace of modules goes; the model knows its bytes.
            assert abs(predicted - calls) <= (one["engine"] == "zero3"), (one["engine"], kind)
            assert size == bytes_, (one["engine"], kind)
    return {one["engine"] for one in found}


@pytest.mark.integration
@pytest.mark.distributed
def test_two_ranks_make_the_predicted_calls() -> None:
    assert checked(ranks.run([SCRIPT, ",".join(CALLS)], 2), 2) == CALLS.keys()


@pytest.mark.integration
@pytest.mark.distributed
@pytest.mark.parametrize("world", [64, 1024])
def test_pretended_ranks_make_the_predicted_calls(world: int) -> None:
    """DDP needs results of its calls that the pretended group does not give."""
    engines = [name for name in CALLS if not name.startswith("ddp")]
    said = ranks.run([SCRIPT, ",".join(engines), str(world)])
    assert checked(said, world) == set(engines)
