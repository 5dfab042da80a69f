"""Shards that are not in the cache yet: reading and fetching ahead share them out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from shard_server import MB, content, file_of, serve

from vlp.data.config import DataConfig
from vlp.data.pretrain.loader import PretrainData
from vlp.data.shards.remote import FETCHED_AHEAD, ShardCache
from vlp.data.stream.batch import Inputs

MakeShards = Callable[..., Path]


@pytest.mark.nightly
@pytest.mark.parametrize("window", [20, 60])
def test_cold_shards_keep_every_connection_busy(
    make_shards: MakeShards, vocabulary: Path, tmp_path: Path, window: int
) -> None:
    shards, seconds = 12, 0.5
    with serve(make_shards(count=10 * shards, per_shard=10)) as server:
        server.seconds = seconds
        config = DataConfig(
            sources=({"path": server.url},),  # type: ignore[arg-type]
            vocabulary=str(vocabulary),
            canonical_streams=2,
            shuffle_window=window,
            workers=0,
            cache={"folder": str(tmp_path / "cache"), "limit": MB},  # type: ignore[arg-type]
        )
        data = PretrainData(config, Inputs(16, (4, 4), 10, 90), 4, 3)
        started = time.monotonic()
        read = sum(int(batch.valid.sum()) for batch, _ in data.batches(stop_after=10 * shards // 4))
        taken = time.monotonic() - started
        asked = [times for name, times in server.asked.items() if name.endswith(".tar")]
    assert read == 10 * shards
    assert asked == [1] * shards
    assert taken < 1.3 * shards * seconds / FETCHED_AHEAD


def test_what_somebody_fetches_keeps_no_other_shard_waiting(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    with serve(make_shards(count=25, per_shard=5)) as server:
        slow, *others = (file_of(server, number) for number in range(5))
        server.stalls[slow.name] = 1
        cache = ShardCache(tmp_path / "cache", MB)
        reading = threading.Thread(target=lambda: content(cache.open(slow)), daemon=True)
        reading.start()
        deadline = time.monotonic() + 20
        while not server.asked[slow.name]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for file in (*[slow] * 5, *others):
            cache.prefetch(file)
        while not all(map(cache.holds, others)):
            assert time.monotonic() < deadline, "they wait for the first one"
            time.sleep(0.01)
        assert not cache.holds(slow)
        server.go.set()
        reading.join(20)
        assert cache.holds(slow)
    assert server.asked[slow.name] == 1
