"""Means over ranks that do not all have the same to tell; see meter_ranks.py."""

import json
from pathlib import Path

import ranks

SCRIPT = Path(__file__).with_name("meter_ranks.py")


def test_a_rank_without_samples_does_not_count() -> None:
    output = ranks.run([SCRIPT], 2)
    found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert found == {"loss/total": 2.0, "loss/words": 3.0, "statistics/bits": 3.0}
