"""A real server that refuses, stalls, breaks off, and gives other bytes under the same name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from shard_server import MB, ShardServer, batches, content, file_of, manifest, serve

from vlp.config import ConfigError
from vlp.data.shards import remote as outages_module
from vlp.data.shards.remote import OutageConfig, PausedDataError, ShardCache
from vlp.data.shards.sample_files import DataError
from vlp.data.shards.shard_reader import BadSample, ShardIndex

SHARD = "shard-000001.tar"
Policy = Literal["fail", "pause", "skip"]
POLICIES: dict[Policy, type[Exception]] = {
    "fail": DataError,
    "pause": PausedDataError,
    "skip": BadSample,
}


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages_module, "_FIRST_WAIT", 0.002)


@pytest.fixture
def server(make_shards: Callable[..., Path]) -> Iterator[ShardServer]:
    """Five shards of five samples each."""
    with serve(make_shards(count=25, per_shard=5)) as told:
        yield told


@pytest.mark.parametrize("trouble", ["fails", "halves", "stalls", "others"])
def test_trouble_that_passes_is_sat_out(
    server: ShardServer, tmp_path: Path, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest(server)
    monkeypatch.setattr(outages_module, "_SILENT_SECONDS", 0.2)
    index = ShardIndex.open(server.url, ShardCache(tmp_path / "cache", MB))
    getattr(server, trouble)[SHARD] = 3
    assert index.read(1, 0) == ShardIndex.open(server.folder).read(1, 0)
    assert server.asked[SHARD] == 4


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("status", [404, 403, 500, 503, 429])
def test_trouble_that_stays_ends_as_the_policy_says(
    server: ShardServer, tmp_path: Path, status: int, policy: Policy
) -> None:
    outages = OutageConfig(seconds=0.1, policy=policy)
    index = ShardIndex.open(server.url, ShardCache(tmp_path / "cache", MB), outages)
    server.status, server.fails[SHARD] = status, 1000
    asked = []
    # A pause would end a run again and again for what no later start finds.
    kind = DataError if policy == "pause" and status <= 404 else POLICIES[policy]
    for sample in range(3):
        with pytest.raises(kind) as error:
            index.read(1, sample)
        assert type(error.value) is kind
        assert f"missing shard: {server.url}/{SHARD} (" in str(error.value)
        asked.append(server.asked[SHARD])
    assert len(set(asked)) == 1  # it is not tried again for each sample
    assert asked[0] > 2 if status > 404 else asked[0] == 1
    assert index.read(2, 0).key == "shards_0010"


@pytest.mark.parametrize("policy", POLICIES)
def test_other_bytes_than_the_manifest_says_are_never_read(
    server: ShardServer, tmp_path: Path, policy: Policy
) -> None:
    manifest(server, 3)
    outages = OutageConfig(seconds=0.1, policy=policy)
    index = ShardIndex.open(server.url, ShardCache(tmp_path / "cache", MB), outages)
    assert index.read(2, 0).key == "shards_0010"
    with pytest.raises(POLICIES[policy], match=r"corrupt shard.*shard-000003\.tar.*SHA-256"):
        index.read(3, 0)
    manifest(server)
    index = ShardIndex.open(server.url, ShardCache(tmp_path / "cache", MB), outages)
    assert index.read(3, 0).key == "shards_0015"
    for text in ("", "[]", '{"shards": [{"sha256": "1"}]}', '{"shards": 3}'):
        (server.folder / "manifest.json").write_text(text)
        with pytest.raises(ConfigError, match=r"manifest\.json: not a manifest"):
            ShardIndex.open(server.url, ShardCache(tmp_path / "cache", MB))


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [0, 2])
def test_a_store_that_is_away_for_a_while_costs_no_sample(
    server: ShardServer, vocabulary: Path, tmp_path: Path, workers: int
) -> None:
    cache = {"folder": str(tmp_path / "cache"), "limit": MB}
    local = list(batches(str(server.folder), vocabulary, None, workers=workers))
    stream = batches(server.url, vocabulary, cache, workers=workers)
    server.status, server.down_until = 503, time.monotonic() + 2
    for (expected, _), (found, _) in zip(local, stream, strict=True):
        assert not found.skipped
        for one, other in zip(expected, found):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert any(count < 0 for count in server.fails.values())


@pytest.mark.parametrize("policy", ["fail", "pause"])
def test_a_worker_says_why_it_cannot_go_on(
    server: ShardServer, vocabulary: Path, tmp_path: Path, policy: Policy
) -> None:
    options: dict[str, Any] = {"outages": {"seconds": 0.1, "policy": policy}, "workers": 1}
    cache = {"folder": str(tmp_path / "cache"), "limit": MB}
    stream = batches(server.url, vocabulary, cache, **options)
    server.down_until = time.monotonic() + 60
    with pytest.raises(POLICIES[policy]) as error:
        list(stream)
    assert str(error.value).startswith(f"missing shard: {server.url}/shard-")
    assert "--resume" in str(error.value)
    assert "Traceback" not in str(error.value)


def test_a_stall_ends_in_seconds(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outages_module, "_SILENT_SECONDS", 0.2)
    server.stalls[SHARD] = 1000
    file = file_of(server, 1, OutageConfig(seconds=0.5))
    started = time.monotonic()
    with pytest.raises(DataError, match=r"missing shard.*Timeout"):
        ShardCache(tmp_path / "cache", MB).open(file)
    assert time.monotonic() - started < 5
    server.stalls[SHARD] = 0
    handle = ShardCache(tmp_path / "cache", MB).open(file)
    assert content(handle) == (server.folder / SHARD).read_bytes()
