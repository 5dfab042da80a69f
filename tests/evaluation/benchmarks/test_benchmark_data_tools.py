"""The cost of data tools is measured of real commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.benchmarks.data.data_tools import Cost, cost, make_shards, table
from vlp.config import ConfigError
from vlp.data.shards.shard_index import ShardIndex


def test_a_command_is_measured(tmp_path: Path) -> None:
    make_shards(tmp_path / "shards", 3)
    assert ShardIndex.open(tmp_path / "shards").shards.total == 3
    one = cost("verify", tmp_path / "shards", "--quick")
    assert one.seconds > 0
    assert 10e6 < one.bytes < 400e6
    with pytest.raises(ConfigError, match="exit 2"):
        cost("verify", tmp_path / "nowhere")


def test_the_start_is_left_out() -> None:
    found = {10: {"index": Cost(3.0, 5_000_000)}, 100: {}}
    assert "200000, 5" in table(found, {"index": Cost(1.0, 0)})
